"""The worker processes of one node: forked from a warm server, each on a pipe that tells when its agent dies.

No torch in here: the fork server has to be started before the agent imports torch, and imports it meanwhile.
"""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from tandem.checkpoint.memory import NodeMemory
from tandem.errors import KILLED, PEER_LOST, PeerLostError
from tandem.launch.restarts import shell_code
from tandem.process import SAFE_PATH, end_with_parent, name_process, safe_path
from tandem.signals import IGNORED_BY_FORK_SERVER
from tandem.timeouts import DISMISSED_SECONDS, KILLED_SECONDS

log = logging.getLogger("tandem.agent")

RankFunction = Callable[[Any, Any], int]


def use_loopback() -> None:
    """Make gloo and NCCL talk over the loopback device: all ranks are on this host, and nobody else is heard.

    Nor need the host's own name resolve.

    To be called before the fork server starts, which hands its environment on to the ranks.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def record_collectives() -> None:
    """Let torch remember the last collectives of each rank, for the report of a hang. As `use_loopback`."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")


def keep_nccl_errors_here() -> None:
    """A NCCL error ends its own generation: no signal in the agents' store, which later ones use, too.

    Signal and dump are what torch does by itself; a rank that is stuck writes its record anyway.
    As `use_loopback`.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def wait_passively() -> None:
    """Let threads of OpenMP sleep while they wait: spinning, they take the cores that others compute on.

    On a busy machine that is the difference between a share of the pace and a sixtieth of it. It is read
    when torch is imported, so it comes before; a value of one's own (GOMP_SPINCOUNT as well) counts.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def resolve(name: str) -> Callable[..., Any]:
    """ "package.module:function" -> the function."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def start_fork_server(preload: Sequence[str], folder: Path) -> None:
    """Start the process that ranks are forked from; it imports `preload` while the caller goes on.

    Importing torch there is what makes a restart fast: 0.1 to 0.3 s instead of 4 (see docs/architecture.md).
    Its socket lies in `folder`: multiprocessing's own would be left behind by an agent that is killed.
    """
    cast(Any, multiprocessing.current_process())._config["tempdir"] = str(folder)
    multiprocessing.set_forkserver_preload(["tandem.launch.deaf", *preload])
    with _no_current_folder():
        resource_tracker.ensure_running()  # before: it unblocks signals when it has started its process
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_BY_FORK_SERVER)
        try:
            forkserver.ensure_running()
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


def _worker_main(
    function: str,
    warm_up: str | None,
    job: Any,
    memories: tuple[NodeMemory, ...],
    lifeline: Connection,
    expected: Any,
) -> None:
    """Entry of every worker process: warms up, waits for its position, then is that rank.

    `expected` is the position that it will most likely get, where one is known.
    """

    def leave_with_agent() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(PEER_LOST)

    end_with_parent(signal.SIGKILL)  # the fork server, which ends with the agent: the pipe needs a free GIL
    name_process("tandem-warming")
    if warm_up is not None:
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            resolve(warm_up)(job, expected)  # what fails here fails again, and is reported, in the rank
    name_process("tandem-standby")
    try:
        position = replace(lifeline.recv(), memories=memories)
    except (EOFError, OSError):
        os._exit(PEER_LOST)
    name_process(f"tandem-rank-{position.rank}")
    threading.Thread(target=leave_with_agent, name="agent-lifeline", daemon=True).start()
    code = resolve(function)(job, position)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _place(position: Any) -> tuple[int, ...] | None:
    """What a program may look at while it is imported."""
    return position and (position.rank, position.local_rank, position.world_size, position.nodes)


@dataclass
class _Worker:
    process: ForkServerProcess
    lifeline: Connection
    expected: Any  # the position that it was warmed up for


class Workers:
    """This node's ranks of one generation after another, running `function` ("module:name"). Not thread-safe.

    Each rank is a new process; while a generation trains, `stand_by` forks those of the next in advance,
    which call `warm_up(job, expected position)` ("module:name") before they wait. Where that depends on the
    rank (`by_position`), a standby is taken for no other.
    """

    def __init__(
        self,
        function: str,
        job: Any,
        memories: Sequence[NodeMemory],
        warm_up: str | None = None,
        by_position: bool = False,
    ) -> None:
        self._arguments = function, warm_up, job, tuple(memories)
        self._by_position = by_position
        self._positions: Mapping[int, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Worker] = {}
        self._standby: list[_Worker] = []

    def start(self, positions: Mapping[int, Any]) -> dict[int, int]:
        """Start one process per local rank; {local rank: pid}."""
        self._ranks, self._positions = {}, positions
        for local_rank, position in positions.items():
            self._ranks[local_rank] = rank = self._take_standby(position) or self._fork(position)
            rank.lifeline.send(position)
        return {local_rank: int(rank.process.pid or 0) for local_rank, rank in self._ranks.items()}

    def stand_by(self, count: int) -> None:
        """Fork one more process for the next generation, unless `count` are waiting (takes about 30 ms)."""
        if len(self._standby) < count:
            taken = {_place(worker.expected) for worker in self._standby}
            free = [each for each in self._positions.values() if _place(each) not in taken]
            self._standby.append(self._fork(free[0] if free else None))

    def _take_standby(self, position: Any) -> "_Worker | None":
        for worker in list(self._standby):
            if worker.process.exitcode is not None:
                self._standby.remove(worker)
                worker.lifeline.close()
            elif not self._by_position or _place(worker.expected) == _place(position):
                self._standby.remove(worker)
                return worker
        return None

    def _fork(self, expected: Any = None) -> "_Worker":
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_worker_main, args=(*self._arguments, theirs, expected))
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise PeerLostError(
                f"the process that ranks are forked from is gone ({type(error).__name__}): it was killed, as "
                "the kernel does where memory is short; start this node again"
            ) from error
        theirs.close()
        return _Worker(process, ours, expected)

    def codes(self) -> dict[int, int | None]:
        """{local rank: shell exit code, or None while it runs}."""
        return {
            local_rank: None if rank.process.exitcode is None else shell_code(rank.process.exitcode)
            for local_rank, rank in self._ranks.items()
        }

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until one of those that run ends."""
        running = [rank.process.sentinel for rank in self._ranks.values() if rank.process.exitcode is None]
        connection.wait(running, seconds)

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that still run."""
        for rank in self._ranks.values():
            if rank.process.exitcode is None and rank.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all have ended; False when the time is over first."""
        deadline = time.monotonic() + timeout_seconds
        for rank in self._ranks.values():
            rank.process.join(max(0.0, deadline - time.monotonic()))
        return all(code is not None for code in self.codes().values())

    def kill(self) -> dict[int, int]:
        """End what still runs, at once (their peers are gone, there is nothing to save); the codes of all."""
        for rank in self._ranks.values():
            if rank.process.exitcode is None:
                rank.process.kill()
        self.wait(KILLED_SECONDS)
        codes = {}
        for local_rank, code in self.codes().items():
            codes[local_rank] = KILLED if code is None else code
            if code is None:
                log.error(
                    "rank %s (process %s) has not ended %g s after SIGKILL: it stands in the kernel, in a "
                    "GPU's driver or at a volume, and keeps its GPU and memory so long; see nvidia-smi and "
                    "dmesg, and restart this machine if it stays",
                    *(self._positions[local_rank].rank, self._ranks[local_rank].process.pid, KILLED_SECONDS),
                )
        for rank in self._ranks.values():
            rank.lifeline.close()
        self._ranks = {}
        return codes

    def dismiss(self) -> None:
        """There is no next generation: those on standby leave."""
        for rank in self._standby:
            rank.lifeline.close()
            rank.process.join(DISMISSED_SECONDS)
        self._standby = []
