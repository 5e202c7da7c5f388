"""`tandem.launch(function)`: run a function on every rank of simulated nodes of this machine.

The job is a `tandem launch` in a separate process, so everything works as on the command line.
"""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from tandem.config import Given, resolve
from tandem.config.fields import plain
from tandem.config.removed import removed_name_message
from tandem.config.settings import unknown
from tandem.config.sources import FIELDS
from tandem.errors import FINISHED, ConfigError
from tandem.launch.run_dir import scratch
from tandem.platforms.detection import detect, on_this_host
from tandem.process import safe_path
from tandem.run.directory import RunDir
from tandem.script.function import RESULT, write
from tandem.script.job import FUNCTION
from tandem.work.base import run_failed

NOT_HERE = ("task", "node_rank", "master")
"""Settings that `tandem.launch` does not take: it starts all nodes, on this machine."""
SEE = "See `tandem help settings`"
LAST_LINES = 100  # of the output; they include the reason of a failure
START = (
    "import os, sys; from tandem.process import end_with_parent; end_with_parent(15); "
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(143); from tandem.cli import main; main()"
)
"""Run `tandem` so that it saves and stops when the thread that started it ends.

The kernel's parent-death signal follows the thread, not the process (prctl(2)). That thread is a daemon,
which ends with its process.
"""


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of a launch that finished.

    `result` is what the function returned on rank 0. `summary` is the content of summary.json in `run_dir`.
    """

    result: Any
    run_dir: Path
    summary: dict[str, Any]


@overload
def launch(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    nodes: int = ...,
    nproc: int = ...,
    wait: Literal[True] = ...,
    **settings: Any,
) -> LaunchResult: ...


@overload
def launch(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    nodes: int = ...,
    nproc: int = ...,
    wait: Literal[False],
    **settings: Any,
) -> "LaunchHandle": ...


def launch(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    nodes: int = 2,
    nproc: int = 1,
    wait: bool = True,
    **settings: Any,
) -> "LaunchResult | LaunchHandle":
    """Run `function(*arguments)` on every rank of simulated nodes of this machine, as `tandem launch` does.

    `nodes`: the number of simulated nodes. `nproc`: ranks per node. `settings`: tandem's settings by name
    (`steps=500, run_dir="runs/mine", max_restarts=3`). The output of the job is printed while it runs. With
    `wait=False`, the call returns a handle at once; its `wait()` returns the result.

        import tandem

        def add(a, b):
            return a + b

        assert tandem.launch(add, 1, 2, nodes=2, metrics=0).result == 3

    Raises ConfigError for a bad function or setting before anything starts, and TandemError with the job's
    `exit_code` if the job fails. Ctrl-C makes the job save and stop, then raises KeyboardInterrupt; a second
    Ctrl-C ends the job at once.
    """
    if not callable(function):
        raise ConfigError(
            f"tandem.launch got {function!r:.80}, expected a function; to run a script, type "
            "`tandem launch SCRIPT.py`"
        )
    name = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "function"
    environ = on_this_host("tandem.launch", os.environ, socket.gethostname())
    flags, run = _checked(name, {"nodes": nodes, "nproc": nproc, **settings}, environ)
    handle = LaunchHandle(name, function, arguments, flags, run, environ)
    return handle.wait() if wait else handle


def _checked(name: str, settings: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[list[str], RunDir]:
    """Return the settings as flags of `tandem launch`, and the run directory. Raises ConfigError."""
    for key in settings:
        if key in NOT_HERE:
            raise ConfigError(f"{key} has no meaning for tandem.launch, which starts all nodes; remove it")
        if key not in FIELDS:
            if gone := removed_name_message("setting", key):
                raise ConfigError(gone)
            raise unknown("setting", key, FIELDS, see=SEE)
    given = {key: Given(plain(value), "tandem.launch", key) for key, value in settings.items()}
    asked = resolve(given, environ).settings.replace(task=name)
    placement = detect(environ, socket.gethostname(), asked.launch)
    run = RunDir.open(asked, placement, time.time())
    flags = {**{key: value.text for key, value in given.items()}, "run_dir": str(run.where)}
    return [f"--{key.replace('_', '-')}={text}" for key, text in flags.items()], run


class LaunchHandle:
    """A job started by `tandem.launch(..., wait=False)`; it saves and stops when this process ends."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        flags: Sequence[str],
        run: RunDir,
        environ: Mapping[str, str],
    ) -> None:
        """Raises ConfigError if the function cannot be pickled."""
        self.run_dir = run.folder
        self._opened = run
        self._call = name, function, arguments
        self._command = [sys.executable, "-c", START, str(os.getpid()), "launch", *flags]
        self._environ = safe_path({**environ, "PYTHONUNBUFFERED": "1"})
        self._process: subprocess.Popen[bytes] | None = None
        self._result: LaunchResult | None = None
        self._error: Exception | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        # This daemon thread starts the job, so the job ends with it, and with this process.
        threading.Thread(target=self._work, name="tandem-launch", daemon=True).start()
        self._started.wait()
        if self._process is None:
            self.wait()

    def wait(self) -> LaunchResult:
        """Wait until the job has ended. Raises TandemError with its `exit_code` if it failed.

        Ctrl-C stops the job, and raises KeyboardInterrupt once it has saved.
        """
        is_interrupted = False
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt:
                is_interrupted = True
                self.stop()
        if is_interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> None:
        """Make the job save and stop; a second call, at least 2 s later, ends it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def _work(self) -> None:
        try:
            with scratch() as folder:
                self._result = self._run(folder)
        except Exception as error:
            self._error = error
        finally:
            self._started.set()
            self._ended.set()

    def _run(self, folder: Path) -> LaunchResult:
        name, function, arguments = self._call
        file = folder / f"{name}.pickle"
        write(file, function, arguments)
        self._process = process = subprocess.Popen(
            [*self._command, "-m", FUNCTION, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,  # Ctrl-C on the terminal must arrive once, through `stop`
        )
        self._started.set()
        lines = deque(_printed(process), maxlen=LAST_LINES)
        if (code := process.wait()) != FINISHED:
            raise run_failed(code, lines)
        packed = file.with_suffix(RESULT)  # missing if the function ended rank 0 with sys.exit(0)
        result = pickle.loads(packed.read_bytes()) if packed.exists() else None
        return LaunchResult(result, self.run_dir, self._opened.summary())


def _printed(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Print each line of the output as it arrives, and yield it."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            text = line.decode(errors="replace")
            with suppress(OSError, ValueError):  # the caller's stdout is closed; the job continues
                print(text, end="", flush=True)
            yield text.strip()
