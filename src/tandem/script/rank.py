"""What a rank of a person's own program does, from its position to its exit code; and its standby."""

import importlib
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from tandem import layout
from tandem.distributed import position as positions
from tandem.distributed.helpers import killed_helper
from tandem.distributed.position import Position
from tandem.errors import FINISHED, GPU_FAILED, PEER_LOST, TandemError, text_of
from tandem.log import keep_bounded, redirect_output, setup
from tandem.process import end_with_parent, safe_path
from tandem.script.environment import error_file, set_variables
from tandem.script.execute import (
    code_of,
    execute,
    forget_the_fork,
    leave,
    without_our_frames,
)
from tandem.script.job import Job
from tandem.script.lifeline import descriptor_for_exec
from tandem.script.watch import Watch, imports_file
from tandem.signals import default_signals
from tandem.tasks.traces import script_trace
from tandem.telemetry.channel import sender
from tandem.telemetry.stacks import keep_stacks

log = logging.getLogger("tandem.run")

COLD = "tandem.script.cold"
OTHER_THREADS = threading.active_count() - 1
"""In the fork server, when it has imported all it forks with; a fork would lose them."""


def run_rank(job: Job, position: Position) -> NoReturn:
    """Entry in a process forked by the agent's fork server: be this rank, or become it by exec."""
    default_signals(spares=job.program.kind != "command")
    set_variables(job, position)
    if job.program.kind == "command":
        _write_to_log(job, position)
        _end_with_fork_server()
        os.execvp(job.program.target, [job.program.target, *job.program.arguments])
    if job.cold:
        _exec_cold(job, position)
    problem = unfit_to_fork()
    if problem:
        if position.local_rank == 0:
            print(
                f"tandem: {problem}; ranks start in new interpreters (as with --fresh-interpreter)",
                file=sys.stderr,
            )
        _exec_cold(job, position)
    forget_the_fork(Path(position.sample_socket or ".").parent)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # read at import, which was before the fork
    run_program(job, position)


def warm_up(job: Job, expected: Position | None) -> None:
    """What a standby does in advance: import what the program has imported, as the rank it will be."""
    if job.cold or job.program.kind == "command" or expected is None:
        return
    set_variables(job, expected)  # some packages look at their rank when they are imported
    names = json.loads(imports_file(expected).read_text())
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def unfit_to_fork() -> str | None:
    """Why this process cannot become a rank as it is: what was imported in advance has done too much."""
    if OTHER_THREADS:
        return "a preloaded module has started threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialized CUDA"
    return None


def run_program(job: Job, position: Position) -> NoReturn:
    """Run the program under watch, and leave with its code; 200 where it has lost its peers."""
    record = _write_to_log(job, position)
    setup(None, position.rank, position.node_rank, True, job.json_lines)
    keep_stacks(Path(job.logs), position.rank)
    watch = Watch(job, position, sender(position.sample_socket))
    launched = positions.launched = positions.Launched(position, watch.hand_over)
    code = _run(job, position, record)
    try:
        code = launched.close(code)  # as the program has set it meanwhile
    except TandemError as error:
        code = _say(error, position)
    watch.close()
    leave(code)


def _run(job: Job, position: Position, record: Any) -> int:
    """Run the program; the code that it ends with."""
    try:
        execute(job.program)
        return FINISHED
    except SystemExit as ending:
        code = code_of(ending)
        if code != FINISHED and lost_its_peers(ending, position.world_size):
            return _say_lost(ending, position, record)
        return code if code == FINISHED else _killed(ending) or code
    except TandemError as error:  # of `tandem.start()` and what it gives
        return _say(error, position)
    except BaseException as error:
        killed = _killed(error)
        _end_loaders()
        without_our_frames(error)
        if lost_its_peers(error, position.world_size):
            return _say_lost(error, position, record)
        _show(error, position, record)
        if killed is not None:
            return killed
        _write_down(error, position)
        if gpu_has_failed(error):
            return GPU_FAILED
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _show(error: BaseException, position: Position, record: Any) -> None:
    """Print Python's own traceback; after tandem.start(), rank 0's terminal gets the script's lines only.

    The log has the full one.
    """
    own_loop = sys.modules.get("tandem.own_loop.run")
    is_ours = own_loop is not None and own_loop._started is not None and isinstance(error, Exception)
    if not is_ours or position.rank != 0 or record is sys.stderr:
        sys.excepthook(type(error), error, error.__traceback__)
        return
    record.write("".join(traceback.format_exception(error)))
    record.flush()
    with suppress(OSError):  # a terminal that was closed
        sys.stderr.write(f"{script_trace(error)}\n")
        sys.stderr.flush()


def lost_its_peers(error: BaseException, world_size: int) -> bool:
    """Whether `error` says that another rank is gone; without torch there is none to lose."""
    if "torch" not in sys.modules:
        return False
    from tandem.distributed.peers import is_peer_loss

    return is_peer_loss(error, world_size)


def gpu_has_failed(error: BaseException) -> bool:
    """Whether CUDA says that this rank's own GPU has failed, in a way that a new process may fix."""
    if "torch" not in sys.modules:
        return False
    from tandem.distributed.gpu_failures import is_gpu_failure

    return is_gpu_failure(error)


def _killed(error: BaseException) -> int | None:
    """The code of a rank that ends because a process which it has started was killed, and a line about it."""
    killed = killed_helper(error)
    if killed is not None:
        log.error("%s; ending the rank as if it had been killed", killed[0])
    return None if killed is None else killed[1]


def _end_loaders() -> None:
    """Those of a loop of one's own: they are deaf to what would end them with the program."""
    loader = sys.modules.get("tandem.data.loader")
    if loader is not None:
        loader.end_loaders()


def _say(error: TandemError, position: Position) -> int:
    """One line, as everywhere; its exit code."""
    error.__traceback__ = error.__cause__ = None
    error.__suppress_context__ = True
    _write_down(error, position)
    log.error("%s", error)
    return error.exit_code


def _say_lost(error: BaseException, position: Position, record: Any) -> int:
    """One line; the traceback is the same on all ranks but the one that is to blame, so it is for the log."""
    said = [line for line in traceback.format_exception(error) if line.strip()]
    record.write("".join(said))
    record.flush()
    _write_down(error, position)
    log.warning("lost the other ranks", extra={"detail": said[-1].strip().splitlines()[-1]})
    return PEER_LOST


def _write_down(error: BaseException, position: Position) -> None:
    """What ended this rank, as torch's own `@record` writes it, for the agent."""
    path = error_file(position)
    if path.exists():
        return  # by @record
    text = "".join(traceback.format_exception(error))
    more = {"py_callstack": text[-20_000:], "timestamp": str(int(time.time()))}
    words = {"message": f"{type(error).__name__}: {text_of(error)}", "extraInfo": more}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"message": words}))


class _Copied(io.FileIO):
    """A terminal's descriptor; what is written there goes to a file as well."""

    def __init__(self, descriptor: int, copy: Any) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._copy = copy

    def write(self, data: Any, /) -> int:
        written = len(data)
        with suppress(OSError):  # a terminal that was closed
            written = super().write(data) or 0
        with suppress(OSError):
            self._copy.write(bytes(data)[:written])
        return written


def _write_to_log(job: Job, position: Position) -> Any:
    """Send this rank's output to RUN_DIR/log/rank-N.log; rank 0 keeps the terminal and copies to its log.

    Returns the log, for text. Native code of rank 0, and a command as rank 0, write to the terminal alone.
    """
    path = Path(job.logs, layout.rank_log(position.rank))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if position.rank != 0:
            redirect_output(path)
            return sys.stderr
        copy = path.open("ab", buffering=0)
        keep_bounded(path, copy.fileno())
    except OSError:  # a worker needs no volume: without one its words go to the terminal
        return sys.stderr
    if job.program.kind != "command":
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            setattr(sys, name, _copying(stream, copy))
    return io.TextIOWrapper(copy, encoding="utf-8")


def _copying(stream: Any, copy: Any) -> io.TextIOWrapper:
    """A stream like this one, whose bytes go to `copy` as well, and as soon."""
    raw: Any = _Copied(stream.fileno(), copy)
    if not stream.write_through:  # with it (python -u, PYTHONUNBUFFERED) there is no buffer at all
        raw = io.BufferedWriter(raw)
    told = stream.encoding, stream.errors, None, bool(stream.line_buffering), bool(stream.write_through)
    return io.TextIOWrapper(raw, *told)


def _exec_cold(job: Job, position: Position) -> NoReturn:
    """Become a new interpreter, with the same process number."""
    path = error_file(position).with_name("job.pickle")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((job, replace(position, memories=()), descriptor_for_exec())))
    _end_with_fork_server()
    flags = cast(Any, subprocess)._args_from_interpreter_flags()
    os.execve(sys.executable, [sys.executable, *flags, "-m", COLD, str(path)], safe_path(os.environ))


def _end_with_fork_server() -> None:
    """What is not ours can hold no pipe to the agent, so the kernel ends it with the fork server, its parent,
    which ends with the agent."""
    end_with_parent(signal.SIGKILL)
