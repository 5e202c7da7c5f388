"""Scripts with loops of their own, started as people start them, and what they end with."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from program_files import program_text

SMALL = program_text("own_loops_small")


class Scripts:
    """Scripts in one folder, with the settings of all their runs."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        own = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "OMP_"))}
        self.environment = own | {
            "OMP_NUM_THREADS": "1",
            "TANDEM_THREADS": "1",
            "TANDEM_CHECKPOINT_EVERY": "5",
            "TANDEM_LOG_EVERY": "1",
            "TANDEM_METRICS": "0",
            "TANDEM_METRICS_LINGER": "0",
        }

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, script: str | Path, run: str, *words: object, **more: object) -> Any:
        """`python script words`, in run directory `run`; `more` are variables."""
        # tandem sets its own threads, and with OMP_NUM_THREADS it would import torch again.
        kept = self._of_launch() if script == "-m" else self.environment
        variables = kept | {"TANDEM_THREADS": "1", "TANDEM_RUN_DIR": run}
        variables |= {n: str(v) for n, v in more.items()}
        command = [sys.executable, str(script), *map(str, words)]
        return self.processes.start(command, cwd=self.folder, env=variables)

    def launch(self, words: list[str], script: str, run: str, **more: object) -> Any:
        """`tandem launch words script`, begun; the threads are what `tandem launch` gives."""
        variables = self._of_launch() | {n: str(v) for n, v in more.items()}
        command = [sys.executable, "-m", "tandem", "launch", "--run-dir", run, *words, script]
        return self.processes.start(command, cwd=self.folder, env=variables)

    def verify(self, script: str, *words: object) -> tuple[int, str]:
        """Exit code and output of `tandem verify-resume --script` at two ranks."""
        own = ["--script", script, "--nproc", 2, *words]
        command = [sys.executable, "-m", "tandem", "verify-resume", *map(str, own)]
        kept = {n: v for n, v in self._of_launch().items() if not n.startswith("TANDEM_")}
        return self.processes.run(command, 200, cwd=self.folder, env=kept)

    def _of_launch(self) -> dict[str, str]:
        """Without a number of threads."""
        return {n: v for n, v in self.environment.items() if n not in ("OMP_NUM_THREADS", "TANDEM_THREADS")}

    def alone(self, script: str | Path, run: str, **more: object) -> tuple[int, str]:
        """Exit code and output of one process."""
        return self.processes.wait(self.start(script, run, **more))

    def ranks(
        self, script: str | Path, run: str, port: int, count: int = 2, **more: object
    ) -> list[tuple[int, str]]:
        """Exit codes and outputs of ranks whose places are set by hand, in the order of ranks."""
        return [self.processes.wait(each) for each in self.begin(script, run, port, count, **more)]

    def begin(self, script: str | Path, run: str, port: int, count: int = 2, **more: object) -> list[Any]:
        """`ranks`, begun."""
        place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self.start(script, run, RANK=r, LOCAL_RANK=r, **place, **more) for r in range(count)]

    def summary(self, run: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / run / "summary.json").read_text()))

    def lines(self, run: str) -> list[tuple[Any, ...]]:
        """What the lines of the log say that is no time."""
        lines = [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["loss"], line["learning_rate"], line.get("scores")) for line in lines]
