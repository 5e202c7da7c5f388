"""Starts `python -m tandem` as a fork of a process that has imported torch: most of such a program's time.
So does `Forked` a script, `[sys.executable, "FILE.py", ...]`, also for the audit.

Such a process shares with others the modules of other packages, and the seed of hashes; tandem's own are
imported in each. A program whose environment has a say in what an import does starts as a new interpreter,
and so does one that imports no torch. With TEST_FORKS=0 (make soak) all do.
"""

import atexit
import ctypes
import gc
import importlib
import io
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VERBS = {"launch", "train", "check", "verify-resume", "eval", "export", "bench", "demo"}
OPTIONS = {"cwd", "env", "stdin", "stdout", "stderr", "text", "start_new_session"}
READ_BY_IMPORTS = (
    "OMP", "GOMP", "MKL", "KMP", "TORCH", "PYTORCH", "PYTHON", "LD_", "LC_", "LANG", "CUDA", "NCCL", "NVIDIA",
    "GLOO", "MALLOC", "GLIBC", "TZ", "PROMETHEUS", "PATH",
)  # fmt: skip
IMPORTS = "TEST_FORKS_IMPORT"
"""The variable with the names of further modules that the process imports before it forks."""
FOLDER = "TANDEM_AUDIT_STEPS"
"""The variable that the audit sets for its programs; `tandem` is not imported for its name."""
SOURCE = str(Path(__file__).parents[1] / "src")
"""In PYTHONPATH it changes nothing: tandem is imported from there anyway."""
ROOM = 64 * 1024  # for the environment, and for the words, of the process as proc(5) shows them
PADDING = "ROOM_FOR_THE_ENVIRONMENT"
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import forked; forked.run(*forked.serve())"
INT = struct.Struct("i")

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def may_be_forked(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    environ = options.get("env") or os.environ
    return (
        os.environ.get("TEST_FORKS") != "0"
        and list(command[:3]) == [sys.executable, "-m", "tandem"]
        and len(command) > 3
        and command[3] in VERBS
        and not {"-h", "--help"} & set(command)
        and set(options) <= OPTIONS
        and options.get("text") is True
        and _of_imports(environ) == _of_imports(os.environ)
        and max(len(_block(environ)), len("\0".join(map(str, command)).encode())) < ROOM
    )


def _of_imports(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(READ_BY_IMPORTS)}
    named = filter(None, found.pop("PYTHONPATH", "").split(os.pathsep))
    places = [place for place in map(os.path.abspath, named) if place != SOURCE]
    return found | ({"PYTHONPATH": os.pathsep.join(places)} if places else {})


def _block(environ: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}\0") for name, value in environ.items())


class Forked(subprocess.Popen[str]):
    """A process that `serve` has forked; it is that one's child, which tells how it ends."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        _, _, _, cwd, env, _, _, _ = rest[:8]
        read, write, out_read, out_write, error_read, error_write = rest[8:14]
        ends, theirs = socket.socketpair()
        self._ends = ends
        words = [str(word) for word in args]
        request = repr((words, str(cwd or os.getcwd()), dict(env or os.environ))).encode()
        fds = [read if read != -1 else 0, out_write if out_write != -1 else 1]
        fds.append(error_write if error_write != -1 else 2)
        with theirs:
            socket.send_fds(_requests(), [b"1"], [theirs.fileno(), *fds])
        try:
            ends.sendall(INT.pack(len(request)) + request)
            self.pid = INT.unpack(_read(ends, INT.size))[0]
        finally:
            self._close_pipe_fds(read, write, out_read, out_write, error_read, error_write)  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._ends.setblocking(not wait_flags & os.WNOHANG)
        try:
            found = self._ends.recv(INT.size)
        except BlockingIOError:
            return 0, 0
        return self.pid, INT.unpack(found)[0] if found else signal.SIGKILL  # the server was killed


def _requests() -> socket.socket:
    """Of this process's server; it is started where there is none."""
    global _server
    if _server is None or _server[0].poll() is not None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", START, str(Path(__file__).parent), str(theirs.fileno()), "x" * ROOM]
        environ = {**os.environ, PADDING: "x" * ROOM}
        nothing = subprocess.DEVNULL
        with theirs:
            server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environ, start_new_session=True, stdin=nothing
            )
        _server = server, ours
        atexit.register(server.wait)
        atexit.register(ours.close)  # ends it; run first
    return _server[1]


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (more := connection.recv(size - len(found))):
            raise EOFError("the process that tests are forked from has ended")
        found += more
    return found


def serve() -> tuple[list[str], str, dict[str, str], list[int]]:
    """In the server: returns in each process that it forks, with what that is to be."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import()
    where = selectors.DefaultSelector()
    where.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in where.select():
            if key.fileobj is not requests:
                pid, status = os.waitpid(key.data[0], 0)
                where.unregister(key.fileobj)
                os.close(key.fd)
                with key.data[1] as ends:
                    _send(ends, status)
                continue
            word, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not word:
                os._exit(0)
            ends = socket.socket(fileno=fds[0])
            words, cwd, environ = eval(_read(ends, INT.unpack(_read(ends, INT.size))[0]))
            pid = os.fork()
            if pid == 0:
                for other in (requests, ends, *(key.data[1] for key in where.get_map().values() if key.data)):
                    other.detach()
                where.close()
                return words, cwd, environ, fds[1:]
            for fd in fds[1:]:
                os.close(fd)
            _send(ends, pid)
            where.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, ends))


def _send(ends: socket.socket, number: int) -> None:
    try:
        ends.sendall(INT.pack(number))
    except OSError:  # nobody wants to know any more
        pass


def _import() -> None:
    """What `tandem launch` imports of other packages, but for what looks at its surroundings at that time.

    The only threads after it are those of NumPy's BLAS, which starts them anew after a fork.
    """
    gc.disable()  # nothing is garbage, and looking for it takes a fifth of the time
    import pydantic  # noqa: F401
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.nn.parallel
    import torch.optim
    import torch.utils.data  # noqa: F401

    from tandem.torch_private import import_what_ddp_imports

    import_what_ddp_imports()
    for name in os.environ.get(IMPORTS, "").split():
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tandem"]:
        del sys.modules[name]
    gc.freeze()  # a collection in a process that is forked would write to all pages, and so copy them
    gc.enable()


def run(words: list[str], cwd: str, environ: dict[str, str], fds: list[int]) -> None:
    """Be `python -m tandem` with these words, in this folder, with these for 0, 1 and 2."""
    os.setsid()
    atexit.register(gc.unfreeze)  # a normal end of Python destroys what a new interpreter's would
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    os.closerange(3, 1 << 16)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # torch's import has looked it up in the server's environment
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for start, end, block in ((45, 46, "\0".join(words).encode()), (47, 48, _block(environ))):
        first, last = int(fields[start]), int(fields[end])
        ctypes.memmove(first, block.ljust(last - first, b"\0"), last - first)
    sys.stdin = open(0, encoding=sys.__stdin__.encoding)
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        stream = io.TextIOWrapper(
            open(number, "wb", closefd=False),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [words[0], *words[3:]]
    sys.path[0] = cwd
    named = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[1:1] = [place for place in named if place not in sys.path]
    import runpy

    run: Any = runpy
    if words[1] != "-m":
        _observe(environ)
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        _end()
    run._run_module_as_main("tandem")


def _end() -> None:
    """Do what Python does at its end, but destroy no modules: for torch, that takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _observe(environ: Mapping[str, str]) -> None:
    """Install what the audit's sitecustomize would have installed when a script of it imports torch."""
    if FOLDER not in environ:
        return
    import torch

    from tandem.verify.audit_observer import install

    install(torch, environ[FOLDER])
