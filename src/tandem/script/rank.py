"""Run a user script as a rank, from its position to its exit code, and prepare standby processes.

See docs/architecture.md#user-scripts.
"""

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
from pathlib import Path
from typing import Any, NoReturn, cast

from tandem import layout
from tandem.code_files import read_installed
from tandem.distributed import position as positions
from tandem.distributed.child_processes import killed_child
from tandem.distributed.position import Position, RankStart
from tandem.errors import FINISHED, GPU_FAILED, PEER_LOST, TandemError
from tandem.log import keep_bounded, redirect_output, setup
from tandem.process import end_with_parent, safe_path
from tandem.script.execute import code_of, execute, forget_the_fork, leave, without_our_frames
from tandem.script.job import Job, error_file, set_variables
from tandem.script.lifeline import descriptor_for_exec
from tandem.script.observer import ScriptMonitor
from tandem.signals import default_signals
from tandem.telemetry.channel import Sender
from tandem.telemetry.stacks import keep_stacks
from tandem.text import with_type

log = logging.getLogger("tandem.run")

FRESH_INTERPRETER_MODULE = "tandem.script.fresh_interpreter"
OTHER_THREADS = threading.active_count() - 1
"""Threads of the fork server after its imports; a fork loses them."""


def run_rank(job: Job, start: RankStart) -> NoReturn:
    """Become the rank in a process that the agent's fork server forked, by calling the script or by exec."""
    position = start.position
    default_signals(ignore_unhandled=job.program.kind != "command")
    set_variables(job, start)
    if job.program.kind == "command":
        _write_to_log(job, position.rank)
        _end_with_fork_server()
        os.execvp(job.program.target, [job.program.target, *job.program.arguments])
    if job.fresh_interpreter:
        _exec_fresh_interpreter(job, start)
    problem = unfit_to_fork()
    if problem:
        if position.local_rank == 0:
            print(
                f"tandem: {problem}; ranks start in new interpreters (as with --fresh-interpreter)",
                file=sys.stderr,
            )
        _exec_fresh_interpreter(job, start)
    forget_the_fork(start.grant.folder)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and "torch" in sys.modules:
        # Torch reads the variable when it is imported, which was before the fork.
        sys.modules["torch"].set_num_threads(int(threads))
    run_program(job, start)


def warm_up(job: Job, expected: RankStart | None) -> None:
    """Prepare a standby process: import the script's modules, as the rank that the process will become."""
    # An exec would lose the imports.
    if job.fresh_interpreter or job.program.kind == "command" or expected is None:
        return
    set_variables(job, expected)  # some packages read their rank when they are imported
    for name in read_installed(expected.grant.imports_file):
        # Some modules can be imported only from inside the script. The rank then imports them, and shows any
        # error.
        with suppress(Exception):
            importlib.import_module(name)


def unfit_to_fork() -> str | None:
    """Return why this process can no longer become a rank, because of what its imports did, or None."""
    if OTHER_THREADS:
        return "a preloaded module has started threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialized CUDA"
    return None


def run_program(job: Job, start: RankStart) -> NoReturn:
    """Run and observe the script, and exit with its code, or with 200 if it has lost its peers."""
    position = start.position
    grant = start.grant
    path = error_file(grant, position.rank)
    record = _write_to_log(job, position.rank)
    setup(None, position.rank, position.node_rank, True, job.json_lines)
    keep_stacks(Path(job.logs), position.rank)
    watch = ScriptMonitor(job, position, Sender(grant.sample_socket).send, grant.imports_file)
    launched = positions.launched = positions.Launched(start, watch.hand_over)
    code = _run(job, position, path, record)
    try:
        code = launched.close(code)  # `close` as the script has set it meanwhile
    except TandemError as error:
        code = _log_error(error, path)
    watch.close()
    leave(code)


def _run(job: Job, position: Position, path: Path, record: Any) -> int:
    """Run the script and return its exit code. The error that ended it, if any, is recorded at `path`."""
    try:
        execute(job.program)
        return FINISHED
    except SystemExit as ending:
        code = code_of(ending)
        # A framework may turn the error of a lost peer into sys.exit(1).
        if code != FINISHED and lost_its_peers(ending, position.world_size):
            return _log_lost(ending, path, record)
        return code if code == FINISHED else _killed(ending) or code
    except TandemError as error:  # from `tandem.start()` and its objects
        return _log_error(error, path)
    except BaseException as error:
        killed = _killed(error)
        _end_loaders()
        without_our_frames(error)
        if lost_its_peers(error, position.world_size):
            return _log_lost(error, path, record)
        _show(error, position.rank, record)
        # A killed helper process is not an error of the script, so nothing is recorded.
        if killed is not None:
            return killed
        _write_down(error, path)
        if gpu_has_failed(error):
            return GPU_FAILED
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _show(error: BaseException, rank: int, record: Any) -> None:
    """Print Python's own traceback; after tandem.start(), rank 0's terminal shows only the script's lines.

    The log has the full traceback.
    """
    own_loop = sys.modules.get("tandem.custom_loop.run")
    is_ours = own_loop is not None and own_loop._started is not None and isinstance(error, Exception)
    if not is_ours or rank != 0 or record is sys.stderr:
        sys.excepthook(type(error), error, error.__traceback__)
        return
    from tandem.tasks.traces import script_trace  # a script that does not call tandem needs no tasks

    record.write("".join(traceback.format_exception(error)))
    record.flush()
    with suppress(OSError):  # the terminal was closed
        sys.stderr.write(f"{script_trace(error)}\n")
        sys.stderr.flush()


def lost_its_peers(error: BaseException, world_size: int) -> bool:
    """Return whether `error` means that another rank is gone. A process without torch has no peers."""
    if "torch" not in sys.modules:
        return False
    from tandem.distributed.peers import is_peer_loss

    return is_peer_loss(error, world_size)


def gpu_has_failed(error: BaseException) -> bool:
    """Return whether CUDA reports that this rank's GPU failed in a way that a new process may fix."""
    if "torch" not in sys.modules:
        return False
    from tandem.distributed.peers import is_gpu_failure

    return is_gpu_failure(error)


def _killed(error: BaseException) -> int | None:
    """Return the exit code if a process that the rank started was killed, and log it; else None."""
    killed = killed_child(error)
    if killed is not None:
        log.error("%s; ending the rank as if it had been killed", killed[0])
    return None if killed is None else killed[1]


def _end_loaders() -> None:
    """Kill the loader processes of a custom loop, which ignore the signals that end the script."""
    loader = sys.modules.get("tandem.data.loader")
    if loader is not None:
        loader.end_loaders()


def _log_error(error: TandemError, path: Path) -> int:
    """Log the error on one line, record it at `path`, and return its exit code."""
    error.__traceback__ = error.__cause__ = None
    error.__suppress_context__ = True
    _write_down(error, path)
    log.error("%s", error)
    return error.exit_code


def _log_lost(error: BaseException, path: Path, record: Any) -> int:
    """Log one line and return 200.

    The traceback is the same on all ranks except the responsible one, so it goes only to the log file.
    """
    lines = [line for line in traceback.format_exception(error) if line.strip()]
    record.write("".join(lines))
    record.flush()
    _write_down(error, path)
    log.warning("lost the other ranks", extra={"detail": lines[-1].strip().splitlines()[-1]})
    return PEER_LOST


def _write_down(error: BaseException, path: Path) -> None:
    """Record for the agent the error that ended this rank, in the format of torch's `@record`."""
    if path.exists():
        return  # written by @record
    text = "".join(traceback.format_exception(error))
    # The end of a long traceback has the error.
    more = {"py_callstack": text[-20_000:], "timestamp": str(int(time.time()))}
    words = {"message": with_type(error), "extraInfo": more}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"message": words}))


class _Copied(io.FileIO):
    """A terminal's descriptor whose output also goes to a file."""

    def __init__(self, descriptor: int, copy: Any) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._copy = copy

    def write(self, data: Any, /) -> int:
        written = len(data)
        with suppress(OSError):  # the terminal was closed
            written = super().write(data) or 0
        with suppress(OSError):
            self._copy.write(bytes(data)[:written])
        return written


def _write_to_log(job: Job, rank: int) -> Any:
    """Send this rank's output to RUN_DIR/log/rank-N.log; rank 0 keeps the terminal and copies to its log.

    Returns the log, for text. Output of native code and of commands on rank 0 has only the terminal.
    """
    path = Path(job.logs, layout.rank_log(rank))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if rank != 0:
            redirect_output(path)
            return sys.stderr
        copy = path.open("ab", buffering=0)
        keep_bounded(path, copy.fileno())
    except OSError:  # without a volume, which workers need not have, the output goes to the terminal
        return sys.stderr
    if job.program.kind != "command":
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            setattr(sys, name, _copying(stream, copy))
    return io.TextIOWrapper(copy, encoding="utf-8")


def _copying(stream: Any, copy: Any) -> io.TextIOWrapper:
    """Return a stream like `stream` whose bytes also go to `copy`, without additional delay."""
    raw: Any = _Copied(stream.fileno(), copy)
    if not stream.write_through:  # it is unbuffered (python -u, PYTHONUNBUFFERED)
        raw = io.BufferedWriter(raw)
    options = stream.encoding, stream.errors, None, bool(stream.line_buffering), bool(stream.write_through)
    return io.TextIOWrapper(raw, *options)


def _exec_fresh_interpreter(job: Job, start: RankStart) -> NoReturn:
    """Replace this process by a new interpreter, which has the same process ID."""
    path = error_file(start.grant, start.position.rank).with_name("job.pickle")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((job, start.with_memories(()), descriptor_for_exec())))
    _end_with_fork_server()
    flags = cast(Any, subprocess)._args_from_interpreter_flags()
    os.execve(
        sys.executable,
        [sys.executable, *flags, "-m", FRESH_INTERPRETER_MODULE, str(path)],
        safe_path(os.environ),
    )


def _end_with_fork_server() -> None:
    """Make the kernel kill this process with the fork server, its parent, which dies with the agent.

    Other programs cannot watch a pipe from the agent.
    """
    end_with_parent(signal.SIGKILL)
