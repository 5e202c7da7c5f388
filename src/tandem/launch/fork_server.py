"""The process that ranks, and simulated nodes, are forked from: forked itself, from one that has torch.

torch and what DDP imports lazily are seconds of one core and 400 MB. Here they are imported once for a node,
and once for all simulated ones; whatever is forked from there, also after a restart, has them at once and
shares their memory. multiprocessing's own fork server, which this is, would begin as a new interpreter.
"""

import contextlib
import gc
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
from tandem.process import SAFE_PATH, name_process, safe_path, stat_of
from tandem.signals import IGNORED_BY_FORK_SERVER
from tandem.silence import still

NAME = "tandem-forks"
UNKNOWN = 255
"""multiprocessing's exit code of a process whose fork server cannot say it any more."""


DEAF, KEEPER = "tandem.launch.deaf", "tandem.launch.keeper"  # what it is, by importing them


def start_fork_server(preload: Sequence[str], folder: Path, keeps: bool = True) -> Callable[[], None]:
    """Start it; it imports `preload` while the caller, which has imported torch then, goes on.

    `keeps`: all that comes from it ends with the caller (keeper.py).

    What is returned waits until it has, and hears signals meanwhile, which `start` does not.
    To be called by a process with a single thread. The socket lies in `folder`: multiprocessing's own would
    be left behind by an agent that is killed. Should it be killed, multiprocessing starts a new interpreter
    in its place, with the same modules.
    """
    with still("importing torch"):
        import torch  # noqa: F401

    cast(Any, multiprocessing.current_process())._config["tempdir"] = str(folder)
    modules = [DEAF, *preload, *([KEEPER] if keeps else [])]
    multiprocessing.set_forkserver_preload(modules)
    with _no_current_folder():
        resource_tracker.ensure_running()  # before: it unblocks signals when it has started its process
    with _blocked_signals():
        imported = _fork(modules)

    def wait() -> None:
        os.read(imported, 1)  # its end

    return wait


def fork_server_pid() -> int | None:
    """Its process; none where none was started yet."""
    pid = cast(Any, forkserver)._forkserver._forkserver_pid
    return None if pid is None else int(pid)


def end_fork_server() -> None:
    """At once, whatever it imports; with it ends what was forked from it. There may be none yet."""
    pid = fork_server_pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def has_gone() -> bool:
    """Whether it was killed: of what was forked from it, multiprocessing then knows no exit code."""
    pid = cast(Any, forkserver)._forkserver._forkserver_pid
    return pid is None or stat_of(pid)[:1] in ([], ["Z"])


def start(process: ForkServerProcess) -> None:
    """Have it forked. Raises PeerLostError where the fork server is gone, or cannot."""
    try:
        with _no_current_folder(), _blocked_signals():  # for a new interpreter in its place
            process.start()
    except (EOFError, OSError) as error:
        raise PeerLostError(
            f"the process that forks the ranks was killed ({type(error).__name__}), probably because memory "
            "ran out; restart this node"
        ) from error


def _fork(preload: Sequence[str]) -> int:
    """What `forkserver.ensure_running` does, by a fork instead of a new interpreter (Python 3.11 to 3.14).

    Returns a pipe that ends when it has imported `preload`.
    """
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()  # it ends when nobody holds our end any more
        secret = _secret()
        imported, imports = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what is shared is not written to by a collection
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            os.close(imported)
            _serve(listener.detach(), alive, imports, preload, secret)
        os.close(alive)
        os.close(imports)
    server = cast(Any, forkserver)._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
    server._forkserver_authkey = secret
    return imported


def _secret() -> bytes | None:
    """The key without which the fork server of Python 3.14 and newer forks nothing; None before 3.14."""
    length = getattr(forkserver, "_AUTHKEY_LEN", None)
    return None if length is None else os.urandom(length)


def _serve(listener: int, alive: int, imports: int, preload: Sequence[str], secret: bytes | None) -> NoReturn:
    """In the new process: nothing of the caller's stack is run to its end here."""
    code = 1
    try:
        name_process(NAME)
        from tandem.launch.deaf import be_deaf

        be_deaf()  # also where the caller's own fork server had imported it
        multiprocessing.set_forkserver_preload(["__main__"])  # those of ranks are a person's own: not deaf
        for name in preload:
            with contextlib.suppress(ImportError):  # as forkserver.main does: a rank says it
                importlib.import_module(name)
        os.close(imports)
        more: dict[str, Any] = {}
        if secret is not None:
            more["authkey_r"], told = os.pipe()
            os.write(told, secret)
            os.close(told)
        forkserver.main(listener, alive, [], **more)
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """What is started meanwhile hears none of those that a fork server ignores before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_BY_FORK_SERVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _no_current_folder() -> Iterator[None]:
    """Interpreters that are started meanwhile import nothing from the current folder."""
    environ = dict(os.environ)
    os.environ.update(safe_path(environ))
    try:
        yield
    finally:
        if SAFE_PATH in environ:
            os.environ[SAFE_PATH] = environ[SAFE_PATH]
        else:
            del os.environ[SAFE_PATH]
