"""Run a user's program in this process as Python itself would, and exit without gloo's abort."""

import atexit
import builtins
import ctypes
import importlib.machinery
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import random
import runpy
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

from tandem.errors import FINISHED, text_of
from tandem.process import is_safe_path_ours
from tandem.script.job import Program
from tandem.timeouts import LEAVING_SECONDS

# The fork server imports this, so it is the object from before the fork.
_MAIN_PROCESS = multiprocessing.current_process()


def forget_the_fork(folder: Path) -> None:
    """Undo what distinguishes a process forked by multiprocessing from a new interpreter.

    multiprocessing's sockets go to `folder`, which is removed even if this process is killed.
    """
    process = cast(Any, multiprocessing.process)
    process._current_process = _MAIN_PROCESS
    process._parent_process = None
    process._children = set()
    _MAIN_PROCESS.name = "MainProcess"
    cast(Any, _MAIN_PROCESS)._config["tempdir"] = str(folder)
    multiprocessing.set_start_method(cast(Any, None), force=True)  # the fork server made itself the default
    sys.modules.pop("__mp_main__", None)
    # Without this, all forks would draw the same numbers.
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def execute(program: Program) -> None:
    """Run the program as `__main__`; its exceptions propagate, SystemExit too."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    # pickle and multiprocessing look for the classes and functions of a script here.
    sys.modules["__main__"] = main
    directory = os.getcwd() if program.kind == "module" else str(Path(program.target).resolve().parent)
    # Python does the same unless its user asked for a safe path; tandem's own request does not count.
    if not sys.flags.safe_path or is_safe_path_ours():
        sys.path.insert(0, directory)
    sys.argv = [program.target, *program.arguments]
    if program.kind == "module":
        cast(Any, runpy)._run_module_as_main(program.target)  # `python -m` itself calls this
        return
    path = os.path.abspath(program.target)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    # Compile from bytes, because the file may declare its encoding (PEP 263).
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def without_our_frames(error: BaseException) -> BaseException:
    """Return the error with the traceback that Python would show, starting in the program's own file."""
    ours = {__file__, runpy.__file__, execute.__code__.co_filename}
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in ours or "/tandem/script/" in trace.tb_frame.f_code.co_filename
        or trace.tb_frame.f_code.co_filename.startswith("<frozen runpy")
    ):  # fmt: skip
        trace = trace.tb_next
    return error.with_traceback(trace)


def code_of(ending: SystemExit) -> int:
    """Return the exit code that Python derives from `sys.exit(...)`; text is printed and gives 1."""
    if ending.code is None:
        return FINISHED
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(text_of(SystemExit(ending.code)), file=sys.stderr)
    return 1


def leave(code: int) -> NoReturn:
    """End this process with Python's own steps in their order, except for the interpreter's finalization.

    Threads of gloo and of the store make some interpreters abort there, after all work is done: 3 of 12
    successful runs were reported as failed. After a failure, threads and exit handlers get LEAVING_SECONDS.
    """
    if code != FINISHED:
        timer = threading.Timer(LEAVING_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
    steps: list[Callable[[], object]] = [
        cast(Any, threading)._shutdown,
        cast(Any, atexit)._run_exitfuncs,
        sys.stdout.flush,
        sys.stderr.flush,
        # os._exit does not flush the buffers of C's stdio, which native code may have filled.
        lambda: ctypes.CDLL(None).fflush(None),
    ]
    for step in steps:
        with suppress(Exception):
            step()
    os._exit(code)
