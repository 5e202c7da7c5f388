"""A small task with everything that makes a resume hard, and runs of it that can be disturbed."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import patient
from program_files import program_text
from tree import of_launch

TASK = program_text("small_runs_task")


UNDISTURBED: dict[tuple[str, tuple[object, ...]], str] = {}


class Runs:
    """Commands on the small task in one folder; 100 steps of 24 samples an epoch."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        (folder / "small.py").write_text(TASK)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}

    def command(self, verb: str, run: str, *flags: object, delay: float = 0.0) -> list[str]:
        module = ["-m", "tandem", verb] if verb != "torchrun" else []
        launcher = [sys.executable, *module]
        if verb == "torchrun":
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                "-m",
                "tandem",
                "train",
            ]
        settings = [
            "--task",
            "small.py:Small",
            "--batch-size",
            "24",
            "--metrics-linger",
            "0",
            "--metrics",
            "0",
        ]
        settings += ["--run-dir", run, "--task.delay", str(delay)]
        return [*launcher, *settings, *map(str, flags)]

    def start(self, verb: str, run: str, *flags: object, delay: float = 0.0) -> Any:
        command = self.command(verb, run, *flags, delay=delay)
        return self.processes.start(command, cwd=self.folder, env=self.environment)

    def finish(self, verb: str, run: str, *flags: object, delay: float = 0.0) -> dict[str, Any]:
        """Run to the end, which has to be a good one; the summary."""
        code, output = self.processes.wait(self.start(verb, run, *flags, delay=delay))
        assert code == 0, output
        return self.summary(run)

    def undisturbed(self, *flags: object, ranks: int = 2) -> str:
        """The weights' SHA-256 of a calm launch; it runs once for all tests that ask for it.

        On one node: two of them start twice the processes, and have the same bits.
        """
        asked = ((self.folder / "small.py").read_text(), (ranks, *flags))
        if asked not in UNDISTURBED:
            UNDISTURBED[asked] = self.finish("launch", "calm", "--nproc", ranks, *flags)["weights_sha256"]
        return UNDISTURBED[asked]

    def summary(self, run: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / run / "summary.json").read_text()))

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def hurry(self) -> None:
        """Let the rest of all runs take its steps without the delay: what had to hit them has."""
        (self.folder / "at-full-speed").touch()

    def wait_for_step(self, run: str, step: int) -> None:
        """Until the newest checkpoint is of `step` or later."""
        self.until(
            lambda: any(event["step"] >= step for event in self.events(run, "checkpoint")), f"step {step}"
        )

    @staticmethod
    def until(condition: Callable[[], bool], what: str, limit: float = 90.0) -> None:
        deadline = time.monotonic() + patient(limit)
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {limit:g} s"
            time.sleep(0.05)


def rank_processes(launch: int) -> dict[str, int]:
    """{"tandem-rank-0": pid, ...} of one launch: loader processes have the name of the rank above them."""
    named = {pid: name for pid, name in of_launch(launch).items() if name.startswith("tandem-rank-")}
    return {name: min(pid for pid, other in named.items() if other == name) for name in named.values()}
