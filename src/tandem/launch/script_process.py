"""Make a script's process a rank: find its settings and position, and control how the process exits.

Under an agent, the position is known (`position.launched`), and the agent's side controls the exit
(`script/rank.py`). Otherwise the environment gives the position, as for `tandem train`, and this module
controls the exit.
"""

import atexit
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tandem import layout
from tandem.config import Parser, resolve
from tandem.data.loader import end_loaders
from tandem.distributed import position as positions
from tandem.distributed.child_processes import killed_child
from tandem.distributed.peers import is_gpu_failure, is_peer_loss
from tandem.errors import FAILED, FINISHED, GPU_FAILED, PEER_LOST, ConfigError, TandemError
from tandem.json_output import drain, wrap_stderr
from tandem.launch.run_dir import adjust_for_job
from tandem.launch.standalone_rank import StandaloneRank
from tandem.log import setup
from tandem.platforms.detection import Placement, detect_here
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.tasks.traces import full_trace, script_trace
from tandem.text import first_line
from tandem.timeouts import BLAME_SECONDS, FINALIZATION_SECONDS

log = logging.getLogger("tandem.run")


class ScriptRank:
    """This process as a rank of a script.

    `chosen` has the names of the settings that were set explicitly.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Find the settings and the position. Raises TandemError."""
        self._exit: ScriptExit | None = None
        self._launched = positions.launched
        loaded = resolve(Parser("train", "", "").read(argv).given, os.environ)
        self.chosen = loaded.chosen
        named = loaded.settings.replace(task=Path(sys.argv[0]).stem or "script")
        if self._launched is not None:
            self.settings = named
            # The script's environment has this generation's store, as torchrun would set it.
            start = self._launched.start
            self.start = replace(start, connection=replace(start.connection, init="env"))
            self._launched.hand_over()
            return
        asked = loaded.settings.launch
        placement = detect_here(os.environ, asked).as_rank()
        if placement.rank is None and placement.nodes > 1:
            raise ConfigError(
                f"this script is one rank, but its place among {placement.nodes} nodes is not set; "
                "start it with torchrun"
            )
        setup(None, None, placement.node_rank, True, loaded.settings.telemetry.log_format == "json")
        # Under an agent, the agent has done this for all its ranks.
        if loaded.settings.telemetry.log_format == "json":
            wrap_stderr(placement.node_rank)
        with only_rank_0_reports(placement):
            run = RunDir.open(named, placement, time.time())
        self.settings = adjust_for_job(run, run.recorded(named), placement)
        standalone = StandaloneRank(run, self.settings, placement)
        self.start = standalone.start
        self._exit = ScriptExit(standalone)

    def end_with(self, close: Callable[[int], int]) -> None:
        """Register `close(code)`, which is called when the script is over and returns the exit code."""
        if self._launched is not None:
            self._launched.close = close
        elif self._exit is not None:
            self._exit.close = close

    def watch_stop_flag(self, stop: StopFlag) -> None:
        """Report each stop in `stop` and exit at a second Ctrl-C, unless an agent does that."""
        if self._exit is not None:
            self._exit.watch_stop_flag(stop)

    @property
    def is_launched(self) -> bool:
        """Whether an agent runs the script and has set up its log."""
        return self._launched is not None


@contextmanager
def only_rank_0_reports(placement: Placement, wait_seconds: float = BLAME_SECONDS) -> Iterator[None]:
    """Let rank 0 alone print a ConfigError that all ranks find; the others exit with the same code.

    They wait `wait_seconds` first, because torchrun ends all ranks as soon as one has failed.
    """
    try:
        yield
    except ConfigError as error:
        if not placement.rank:
            raise
        time.sleep(wait_seconds)
        raise SystemExit(error.exit_code) from None


class ScriptExit:
    """Control what happens between a script's last line and the end of its process.

    `close(code)` is called when the script is over and returns the exit code. An error of tandem prints one
    line and has its own code. A lost peer exits with 200, and any other error with 1 and a traceback.
    """

    def __init__(self, standalone: StandaloneRank) -> None:
        self.close: Callable[[int], int] = lambda code: code
        self._standalone = standalone
        self._position = standalone.position
        self.watch_stop_flag = standalone.watch_stop_flag
        self._code = FINISHED
        self._reason = "the script finished"
        self._show = sys.excepthook
        # atexit runs after the hook, so it knows how the script ended.
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._code = code_of(error, self._position.world_size)
        self._reason = first_line(error)
        end_loaders()
        if self._code != PEER_LOST and not isinstance(error, TandemError):
            self._show_own(kind, error, trace)
        elif self._code == PEER_LOST and not isinstance(error, TandemError):
            log.error("lost the other ranks: %s", self._reason)
        else:
            log.error("%s", error)

    def _show_own(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the script's own frames on the terminal, and write the whole traceback to the rank's log."""
        if not isinstance(error, Exception):
            self._show(kind, error, trace)
            return
        where = f"{layout.LOG}/{layout.rank_log(self._position.rank)}"
        log.info("the full traceback is in %s", where, extra={"detail": full_trace(error)})
        print(script_trace(error), file=sys.stderr)

    def _at_exit(self) -> None:
        try:
            self._code = self.close(self._code)
        except TandemError as error:
            self._code = error.exit_code
            self._reason = str(error)
            log.error("%s", error)
        self._standalone.ended(self._code, self._reason)
        self._standalone.close()
        sys.stdout.flush()
        sys.stderr.flush()
        drain()
        # os._exit skips the interpreter's finalization, which may abort and change the code.
        if self._code != FINISHED:
            os._exit(self._code)
        # The interpreter's own exit code, such as that of a later sys.exit(3), is not known here.
        leave_without_destructors()
        park_aborting_threads()


def code_of(error: BaseException, world_size: int) -> int:
    """Return the exit code for an uncaught error (see `errors`)."""
    if isinstance(error, TandemError):
        return error.exit_code
    killed = killed_child(error)
    if is_gpu_failure(error):
        return GPU_FAILED
    if is_peer_loss(error, world_size):
        return PEER_LOST
    return FAILED if killed is None else killed[1]


def leave_without_destructors() -> None:
    """Let the process end without running C++ destructors, whatever its exit code.

    Threads of gloo and of the store make some interpreters abort in them. glibc calls the functions
    registered with on_exit in reverse order and passes them the exit code. Without on_exit (musl, for
    example), nothing changes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def park_aborting_threads() -> None:
    """Let a thread wait, instead of aborting the process, if it needs the GIL while the interpreter ends.

    Before Python 3.14, such a thread is unwound. If it is in torch's C++ code, for example because gloo
    releases a tensor, std::terminate then aborts the process, after all work is done. From 3.14 on, Python
    itself lets it wait. If the main thread calls std::terminate, the alarm ends the process. Without
    libstdc++, nothing changes.
    """
    if sys.version_info >= (3, 14):
        return
    with suppress(OSError, AttributeError):
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        signal.alarm(FINALIZATION_SECONDS)
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
