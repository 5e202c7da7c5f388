"""A run of `tandem launch` that is started, killed and observed from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem import layout
from tandem.errors import FINISHED, StoppedError
from tandem.launch.simulated import stop_with_parent
from tandem.process import below, is_alive, safe_path, send
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.timeouts import END_LOOK_SECONDS, END_POLL_SECONDS, KILLED_SECONDS, STEP_POLL_SECONDS
from tandem.verify.outcome import Outcome
from tandem.work.base import run_failed

QUIET: Mapping[str, object] = {
    "--metrics-linger": 0,
    "--progress": "off",
    # An error, or the page's address, is found in lines of text.
    "--log-format": "text",
}


@dataclass(frozen=True)
class Kill:
    """SIGKILL once `step` is finished: to one rank (a new generation begins), or to every process."""

    step: int
    rank: int | None = None


class NothingResumedError(Exception):
    """The run ended before it could be killed, or began again at step 0."""


class WatchedRun:
    """A `tandem launch` in its own session; leaving the block kills its remaining processes."""

    def __init__(
        self,
        environ: Mapping[str, str],
        run_dir: Path,
        flags: Mapping[str, object],
        arguments: Sequence[str] = (),
        program: Sequence[str] = (),
    ) -> None:
        """`arguments`: the flags that a user typed, which `flags` override. `program`: words of a script."""
        given = {"--run-dir": run_dir, **QUIET, **flags}
        words = [str(word) for pair in given.items() for word in pair]
        # The last of two equal flags counts.
        self._command = [sys.executable, "-m", "tandem", "launch", *arguments, *words, *program]
        # No message is needed about a run that is killed on purpose; the variable overrides a line of .env.
        self._environ = {**environ, "TANDEM_NOTIFY": "none"}
        self._run_dir = run_dir
        self._output = run_dir.with_suffix(".log")
        self._generations = 0  # number of generations killed so far
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(self, *_error: object) -> None:
        self._kill_all()

    def kill(self, kill: Kill, stop: StopFlag) -> int:
        """Wait until the run reaches `kill.step`, then kill; return the last step that it had logged.

        A kill of every process also waits for the first checkpoint, which a thread writes.
        Raises NothingResumedError, and RunFailedError if it ends by itself with an error.
        """
        process = self._started()
        # After a resume, the log already has the step from the generation before. The kill must hit a
        # generation that has trained.
        while (
            self._logged_step() < kill.step
            or len(self._events("training")) <= self._generations
            # Memory dies with the processes. A run that begins again at step 0 would prove nothing.
            or (kill.rank is None and not self._events("checkpoint"))
        ):
            self._look(process, stop)
            time.sleep(STEP_POLL_SECONDS)
        self._generations += 1
        if kill.rank is None:
            self._kill_all()
        else:
            _kill_rank(process.pid, kill.rank)
        # Read again, because the run may have finished more steps before the signal arrived.
        return self._logged_step()

    def finish(self, stop: StopFlag, look: Callable[[int], None] | None = None) -> None:
        """Run or resume to the end; call `look(session)` repeatedly. Raises RunFailedError."""
        process = self._started()
        while process.poll() is None:
            if look is not None:
                look(process.pid)
            if stop:
                raise StoppedError(f"stopped by {stop.name}; no result")
            time.sleep(END_POLL_SECONDS)
        self._fail_unless_finished(process)

    def outcome(self) -> Outcome:
        """Return the run's result. Raises CheckpointError for a state that cannot be read."""
        return Outcome.read(self._run_dir)

    def has_trained(self) -> bool:
        """Return True if a step was finished."""
        return bool(self._events("training"))

    def kept_that_differs(self) -> list[str]:
        """Return the names of values that a script keeps and that differ between ranks."""
        return [str(name) for event in self._events("kept_differs") for name in event.get("names", ())]

    def had_finished(self, last_step: int) -> bool:
        """Return True if `last_step` was done before the last kill, so that nothing was left to resume."""
        return len(self._events("training")) <= self._generations and self._logged_step() >= last_step

    def resumed_from(self) -> list[int]:
        """Return the steps of the checkpoints that it resumed from, in order."""
        return [int(event["step"]) for event in self._events("resumed")]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind; "training" follows the first step of each generation."""
        return [event for event in RunDir(self._run_dir).events() if event.get("kind") == kind]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A run that is killed and resumed has one log, whose end explains a failure.
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=safe_path(self._environ),
                    # Ctrl-C reaches the terminal's foreground group only. This process decides when the run
                    # ends.
                    start_new_session=True,
                    preexec_fn=stop_with_parent,
                )
        return self._process

    def _look(self, process: subprocess.Popen[bytes], stop: StopFlag) -> None:
        if stop:
            raise StoppedError(f"stopped by {stop.name}; no result")
        if process.poll() is not None:
            self._fail_unless_finished(process)
            raise NothingResumedError

    def _fail_unless_finished(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode != FINISHED:
            raise run_failed(process.returncode, self._output.read_text(errors="replace").splitlines())

    def _logged_step(self) -> int:
        """Return the step of the last complete line of metrics.jsonl; 0 without one."""
        try:
            # The file does not exist before the first step, and its last line may be half written.
            whole = (self._run_dir / layout.METRICS).read_bytes().rpartition(b"\n")[0]
        except OSError:
            return 0
        return int(json.loads(whole.rpartition(b"\n")[2])["step"]) if whole else 0

    def _kill_all(self) -> None:
        if self._process is not None:
            kill_tree(self._process)
            self._process = None


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, and all its descendants; return when they are gone."""
    # List them before the kill: orphans get another parent and can no longer be found below this process.
    all_below = below(process.pid)
    with suppress(ProcessLookupError):
        # First kill the process that would restart the others.
        os.killpg(process.pid, signal.SIGKILL)
    send(signal.SIGKILL, all_below)
    process.wait()
    # The next launch uses the same directory, so the killed processes must not write there any more.
    deadline = time.monotonic() + KILLED_SECONDS
    while any(is_alive(each.pid) for each in all_below) and time.monotonic() < deadline:
        time.sleep(END_LOOK_SECONDS)


def rank_processes(launch: int) -> dict[int, int]:
    """Return {rank: process ID} of a launch's ranks; their child processes have the same name."""
    named = [each for each in below(launch) if each.name.startswith("tandem-rank-")]
    ranks = {each.pid for each in named}
    return {int(each.name.rpartition("-")[2]): each.pid for each in named if each.parent not in ranks}


def _kill_rank(launch: int, rank: int) -> None:
    victim = rank_processes(launch).get(rank)
    # The rank ended by itself after the last look.
    if victim is None:
        raise NothingResumedError
    os.kill(victim, signal.SIGKILL)
