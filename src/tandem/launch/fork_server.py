"""Fork ranks and simulated nodes from a process that has already imported torch.

Importing torch, and what DDP imports lazily, takes seconds of one core and 400 MB. Here it happens once per
node, or once for all simulated nodes. Every process forked from the server, even after a restart, has the
modules at once and shares their memory. The server is multiprocessing's fork server, but forked from this
process instead of started as a new interpreter. See docs/architecture.md#design-changes.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn, cast

from tandem.errors import PeerLostError
from tandem.log import log_if_slow
from tandem.process import SAFE_PATH, end_with_parent, name_process, safe_path, stat_of, without_collection
from tandem.signals import deferred_signals

NAME = "tandem-forks"
UNKNOWN = 255
"""multiprocessing's exit code of a process whose fork server can no longer report it."""


# Modules that take effect when the server imports them.
DEAF = "tandem.launch.fork_server_signals"
KEEPER = "tandem.launch.descendants"


def start_fork_server(preload: Sequence[str], folder: Path, keeps: bool = True) -> Callable[[], None]:
    """Fork the server, which imports `preload` while the caller continues.

    Returns a function that waits until the imports are done.

    `keeps`: all descendants of the server end with the caller (descendants.py).

    Call it from a process with a single thread. Unlike `start`, the returned function can be interrupted by
    signals. The server's socket is in `folder`, because multiprocessing's own directory would be left behind
    by a killed agent. If the server is killed, multiprocessing starts a new interpreter in its place, with
    the same modules.
    """
    with log_if_slow("importing torch"):
        # Before the fork, so that every process forked from the server shares it.
        import torch  # noqa: F401

    cast(Any, multiprocessing.current_process())._config["tempdir"] = str(folder)
    modules = [DEAF, *preload, *([KEEPER] if keeps else [])]
    multiprocessing.set_forkserver_preload(modules)
    with _no_current_folder():
        resource_tracker.ensure_running()  # first, because starting its process unblocks signals
    with deferred_signals():
        imported = _fork(modules)

    def wait() -> None:
        os.read(imported, 1)  # until the end of the pipe

    return wait


def fork_server_pid() -> int | None:
    """Return the server's process ID, or None if none has been started."""
    pid = cast(Any, forkserver)._forkserver._forkserver_pid
    return None if pid is None else int(pid)


def end_fork_server() -> None:
    """Kill the server and everything forked from it at once. Does nothing if there is no server."""
    pid = fork_server_pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def has_exited() -> bool:
    """Return whether the server was killed. multiprocessing then knows no exit code of its children."""
    pid = cast(Any, forkserver)._forkserver._forkserver_pid
    return pid is None or stat_of(pid)[:1] in ([], ["Z"])


def start(process: ForkServerProcess) -> None:
    """Fork `process` from the server. Raises PeerLostError if the server is gone or cannot fork."""
    try:
        with _no_current_folder(), deferred_signals():  # inherited by a new interpreter in the server's place
            process.start()
    except (EOFError, OSError) as error:
        raise PeerLostError(
            f"the process that forks the ranks was killed ({type(error).__name__}), probably because memory "
            "ran out; restart this node"
        ) from error


def _fork(preload: Sequence[str]) -> int:
    """Do what `forkserver.ensure_running` does, but fork instead of starting an interpreter.

    Checked with Python 3.11 to 3.14. Returns the read end of a pipe that closes when all is imported.
    """
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        # Before listen(): another user who connects could run code as this one.
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()  # closes when no process has our end open
        secret = _secret()
        imported, imports = os.pipe()
        # The fork would copy buffered text, and both processes would write it.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            os.close(imported)
            _serve(listener.detach(), alive, imports, preload, secret)
        os.close(alive)
        os.close(imports)
    server = cast(Any, forkserver)._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = ours
    server._forkserver_pid = pid
    server._forkserver_authkey = secret
    return imported


def _secret() -> bytes | None:
    """Return the key that Python 3.14's fork server requires of its clients; None in older versions."""
    length = getattr(forkserver, "_AUTHKEY_LEN", None)
    return None if length is None else os.urandom(length)


def _serve(listener: int, alive: int, imports: int, preload: Sequence[str], secret: bytes | None) -> NoReturn:
    """Become the fork server in the new process. Never returns into the caller's stack."""
    code = 1
    try:
        # Do this first, so that this process ends with the caller even if it is stopped before its first
        # import.
        end_with_parent(signal.SIGKILL)
        name_process(NAME)
        from tandem.launch.fork_server_signals import ignore_signals

        ignore_signals()  # again: its module may have been imported in the caller's own fork server
        # Fork servers that ranks start must not import fork_server_signals.py.
        multiprocessing.set_forkserver_preload(["__main__"])
        with without_collection():
            for name in preload:
                with contextlib.suppress(ImportError):  # as forkserver.main does; the rank reports it
                    importlib.import_module(name)
        os.close(imports)
        more: dict[str, Any] = {}
        if secret is not None:
            # forkserver.main reads the key from a pipe, as from its usual parent.
            more["authkey_r"], writer = os.pipe()
            os.write(writer, secret)
            os.close(writer)
        forkserver.main(listener, alive, [], **more)
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Exit handlers and buffered output are the caller's.
        os._exit(code)


@contextlib.contextmanager
def _no_current_folder() -> Iterator[None]:
    """Keep interpreters that are started in this block from importing modules of the current directory."""
    environ = dict(os.environ)
    os.environ.update(safe_path(environ))
    try:
        yield
    finally:
        if SAFE_PATH in environ:
            os.environ[SAFE_PATH] = environ[SAFE_PATH]
        else:
            del os.environ[SAFE_PATH]
