"""One run of `tandem launch`, started, killed and looked at from the outside."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import FINISHED, StoppedError, TandemError
from tandem.launch.simulated import stop_with_parent
from tandem.signals import StopFlag
from tandem.timeouts import END_POLL_SECONDS, STEP_POLL_SECONDS
from tandem.verify.outcome import Outcome


@dataclass(frozen=True)
class Kill:
    """SIGKILL once `step` is finished: to one rank (its agent opens the next world), or to every process."""

    step: int
    rank: int | None = None


class RunFailedError(TandemError):
    """A run of the task ended with an error, `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class EndedFirstError(Exception):
    """The run was over before it could be killed."""


class WatchedRun:
    """One `tandem launch`, leader of a session of its own; leaving the block ends what is left of it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], run_dir: Path, steps: int) -> None:
        self._command, self._environ, self._run_dir, self._steps = command, environ, run_dir, steps
        self._output = run_dir.with_suffix(".log")
        self._worlds = 0  # those that have been killed
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(self, *_error: object) -> None:
        self._kill_all()

    def kill(self, kill: Kill, stop: StopFlag) -> int:
        """Let it reach `kill.step`, then kill; the step whose log line it had written by then.

        Raises EndedFirstError, and RunFailedError where it ends by itself with an error.
        """
        process = self._started()
        while self._logged_step() < kill.step or len(self._events("training")) <= self._worlds:
            self._look(process, stop)
            time.sleep(STEP_POLL_SECONDS)
        self._worlds += 1
        if kill.rank is None:
            self._kill_all()
        else:
            victim = _rank_processes(process.pid).get(kill.rank)
            if victim is None:
                raise EndedFirstError
            os.kill(victim, signal.SIGKILL)
        reached = self._logged_step()
        if reached >= self._steps:
            raise EndedFirstError
        return reached

    def finish(self, stop: StopFlag) -> None:
        """Run, or resume, to the end. Raises RunFailedError."""
        process = self._started()
        while process.poll() is None:
            if stop:
                raise StoppedError(f"stopped by {stop.name}; nothing is decided")
            time.sleep(END_POLL_SECONDS)
        self._fail_unless_finished(process)

    def outcome(self) -> Outcome:
        """What it ended with. Raises CheckpointError for a state that cannot be read."""
        return Outcome.read(self._run_dir, self._steps)

    def resumed_from(self) -> list[int]:
        """The steps of the checkpoints that it resumed from, in order."""
        return [int(event["step"]) for event in self._events("resumed")]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Whole lines of events.jsonl of one kind: "training" comes after the first step of each world."""
        try:
            whole = (self._run_dir / "events.jsonl").read_bytes().rpartition(b"\n")[0]
        except OSError:
            return []
        return [event for event in map(json.loads, whole.splitlines()) if event["kind"] == kind]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(self._environ),
                    start_new_session=True,
                    preexec_fn=stop_with_parent,
                )
        return self._process

    def _look(self, process: subprocess.Popen[bytes], stop: StopFlag) -> None:
        if stop:
            raise StoppedError(f"stopped by {stop.name}; nothing is decided")
        if process.poll() is not None:
            self._fail_unless_finished(process)
            raise EndedFirstError

    def _fail_unless_finished(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode != FINISHED:
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            words = self._output.read_text(errors="replace").splitlines()
            said = [line for line in words if "error: " in line] or words
            raise RunFailedError(
                said[-1].partition("error: ")[2] or said[-1] if said else f"code {code}", code
            )

    def _logged_step(self) -> int:
        """The step of the last whole line of metrics.jsonl; 0 where there is none."""
        try:
            whole = (self._run_dir / "metrics.jsonl").read_bytes().rpartition(b"\n")[0]
        except OSError:
            return 0
        return int(json.loads(whole.rpartition(b"\n")[2])["step"]) if whole else 0

    def _kill_all(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process = None


def _rank_processes(session: int) -> dict[int, int]:
    """{rank: process id} of the ranks in a session (Linux: /proc); their loader processes bear their name."""
    parents: dict[int, int] = {}
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, pid = (entry / "comm").read_text().strip(), int(entry.name)
                if name.startswith("tandem-rank-") and os.getsid(pid) == session:
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":  # a zombie is a rank of the world before
                        ranks[pid], parents[pid] = int(name.rpartition("-")[2]), int(parent)
            except OSError:  # gone meanwhile
                continue
    return {rank: pid for pid, rank in ranks.items() if parents[pid] not in ranks}
