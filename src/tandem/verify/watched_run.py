"""One run of `tandem launch`, started, killed and looked at from the outside."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import FINISHED, StoppedError, TandemError
from tandem.launch.simulated import stop_with_parent
from tandem.process import safe_path
from tandem.signals import StopFlag
from tandem.telemetry.journal import read_events
from tandem.timeouts import END_POLL_SECONDS, STEP_POLL_SECONDS
from tandem.verify.outcome import Outcome

NO_ERROR = re.compile(r"\d\d:\d\d:\d\d (node|rank) \d+ \| (?!error: )")
"""A line of our own log that tells of something else."""
WHOSE = re.compile(r"^(\[rank\d+\]: )?(tandem\.errors\.\w+: )?")
"""What torch and a traceback put before the words of an error."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL once `step` is finished: to one rank (a new generation begins), or to every process."""

    step: int
    rank: int | None = None


class RunFailedError(TandemError):
    """A run ended with an error, `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class EndedFirstError(Exception):
    """The run was over before it could be killed."""


class WatchedRun:
    """One `tandem launch`, leader of a session of its own; leaving the block ends what is left of it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], run_dir: Path) -> None:
        self._command, self._environ, self._run_dir = command, environ, run_dir
        self._output = run_dir.with_suffix(".log")
        self._generations = 0  # those that have been killed
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
        while self._logged_step() < kill.step or len(self._events("training")) <= self._generations:
            self._look(process, stop)
            time.sleep(STEP_POLL_SECONDS)
        self._generations += 1
        if kill.rank is None:
            self._kill_all()
        else:
            victim = rank_processes(process.pid).get(kill.rank)
            if victim is None:
                raise EndedFirstError
            os.kill(victim, signal.SIGKILL)
        return self._logged_step()

    def finish(self, stop: StopFlag, look: Callable[[int], None] | None = None) -> None:
        """Run, or resume, to the end; `look(its session)` again and again. Raises RunFailedError."""
        process = self._started()
        while process.poll() is None:
            if look is not None:
                look(process.pid)
            if stop:
                raise StoppedError(f"stopped by {stop.name}; nothing is decided")
            time.sleep(END_POLL_SECONDS)
        self._fail_unless_finished(process)

    def outcome(self) -> Outcome:
        """What it ended with. Raises CheckpointError for a state that cannot be read."""
        return Outcome.read(self._run_dir)

    def has_trained(self) -> bool:
        """Whether there was a step."""
        return bool(self._events("training"))

    def was_through(self, last_step: int) -> bool:
        """Whether the last kill came when `last_step` was done, so that nothing was left to resume."""
        return len(self._events("training")) <= self._generations and self._logged_step() >= last_step

    def resumed_from(self) -> list[int]:
        """The steps of the checkpoints that it resumed from, in order."""
        return [int(event["step"]) for event in self._events("resumed")]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Whole lines of events.jsonl of one kind: "training" comes after the first step of each world."""
        return [event for event in read_events(self._run_dir) if event.get("kind") == kind]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=safe_path(self._environ),
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
            lines = self._output.read_text(errors="replace").splitlines()
            raise RunFailedError(last_words([line for line in lines if line.strip()]) or f"code {code}", code)

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


def last_words(lines: Sequence[str]) -> str:
    """Why a run failed, in one line: its last error, or the end of a script's traceback.

    The agent of a script says last whose code has ended it; rank 0's own words stand just before that, and
    those of another rank below it.
    """
    last = next((n for n in reversed(range(len(lines))) if "error: " in lines[n]), len(lines) - 1)
    if lines and "error: ended with code " in lines[last]:
        own = (lines[last + 1 :] or lines[:last])[-1:]
        if own and not NO_ERROR.match(own[0]):
            return WHOSE.sub("", own[0].rpartition("| error: ")[2].strip())
    return lines[last].partition("error: ")[2] or lines[last].removeprefix("tandem: ") if lines else ""


def rank_processes(session: int) -> dict[int, int]:
    """{rank: process id} of the ranks in a session (Linux: /proc); their loader processes bear their name."""
    parents: dict[int, int] = {}
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, pid = (entry / "comm").read_text().strip(), int(entry.name)
                if name.startswith("tandem-rank-") and os.getsid(pid) == session:
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":  # a zombie is a rank of the generation before
                        ranks[pid], parents[pid] = int(name.rpartition("-")[2]), int(parent)
            except OSError:  # gone meanwhile
                continue
    return {rank: pid for pid, rank in ranks.items() if parents[pid] not in ranks}
