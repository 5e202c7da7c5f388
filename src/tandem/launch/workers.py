"""The worker processes of one node: forked from a warm server, each on a pipe that tells when its agent dies.

No torch in here: the fork server has to be started before the agent imports torch, and imports it meanwhile.
"""

import contextlib
import ctypes
import importlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from tandem.checkpoint.memory import NodeMemory
from tandem.errors import KILLED, PEER_LOST
from tandem.launch.restarts import shell_code
from tandem.timeouts import DISMISSED_SECONDS, KILLED_SECONDS

PR_SET_NAME = 15

RankFunction = Callable[[dict[str, object], Any], int]


def use_loopback() -> None:
    """Make gloo talk over the loopback device: all ranks are on this host, whose own name may not resolve.

    To be called before the fork server starts, which hands its environment on to the ranks.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def record_collectives() -> None:
    """Let torch remember the last collectives of each rank, for the report of a hang. As `use_loopback`."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")


def resolve(name: str) -> Callable[..., Any]:
    """ "package.module:function" -> the function."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the warm process that ranks are forked from; it imports while the caller goes on.

    Importing torch here is what makes a restart fast: 0.1 to 0.3 s instead of 4 (see docs/architecture.md).
    """
    multiprocessing.set_forkserver_preload(["tandem.launch.warm", *preload])
    forkserver.ensure_running()


def _worker_main(
    function: str,
    warm_up: str | None,
    settings: dict[str, object],
    memories: tuple[NodeMemory, ...],
    lifeline: Connection,
) -> None:
    """Entry of every worker process: warms up, waits for its position, then is that rank."""

    def leave_with_agent() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(PEER_LOST)

    _name_process("tandem-standby")
    if warm_up is not None:
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            resolve(warm_up)(settings)  # what fails here fails again, and is reported, in the rank
    try:
        position = replace(lifeline.recv(), memories=memories)
    except (EOFError, OSError):
        os._exit(PEER_LOST)
    _name_process(f"tandem-rank-{position.rank}")
    threading.Thread(target=leave_with_agent, name="agent-lifeline", daemon=True).start()
    code = resolve(function)(settings, position)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _name_process(name: str) -> None:
    """What `ps` and `pkill` know this process by (Linux: prctl(2), 15 characters)."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@dataclass
class _Worker:
    process: ForkServerProcess
    lifeline: Connection


class Workers:
    """This node's ranks of one generation after another, running `function` ("module:name"). Not thread-safe.

    Each rank is a new process; while a generation trains, `stand_by` forks those of the next in advance,
    which call `warm_up(settings)` ("module:name") before they wait.
    """

    def __init__(
        self,
        function: str,
        settings: dict[str, object],
        memories: Sequence[NodeMemory],
        warm_up: str | None = None,
    ) -> None:
        self._arguments = function, warm_up, settings, tuple(memories)
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Worker] = {}
        self._standby: list[_Worker] = []

    def start(self, positions: Mapping[int, Any]) -> dict[int, int]:
        """Start one process per local rank; {local rank: pid}."""
        self._ranks = {}
        for local_rank, position in positions.items():
            self._ranks[local_rank] = rank = self._take_standby() or self._fork()
            rank.lifeline.send(position)
        return {local_rank: int(rank.process.pid or 0) for local_rank, rank in self._ranks.items()}

    def stand_by(self, count: int) -> None:
        """Fork one more process for the next generation, unless `count` are waiting (takes about 30 ms)."""
        if len(self._standby) < count:
            self._standby.append(self._fork())

    def _take_standby(self) -> "_Worker | None":
        while self._standby:
            rank = self._standby.pop()
            if rank.process.exitcode is None:
                return rank
            rank.lifeline.close()
        return None

    def _fork(self) -> "_Worker":
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_worker_main, args=(*self._arguments, theirs))
        process.start()
        theirs.close()
        return _Worker(process, ours)

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
        codes = {
            local_rank: code if code is not None else KILLED for local_rank, code in self.codes().items()
        }
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
