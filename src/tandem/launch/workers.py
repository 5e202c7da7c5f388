"""The worker processes of one node: forked from a warm server, each on a pipe that ends with its agent."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from tandem.checkpoint.memory import NodeMemory
from tandem.errors import GPU_FAILED, KILLED, PEER_LOST
from tandem.launch.fork_server import start
from tandem.launch.restarts import shell_code
from tandem.process import end_with_parent, name_process
from tandem.silence import still
from tandem.timeouts import DISMISSED_SECONDS, KILLED_SECONDS

log = logging.getLogger("tandem.agent")

RankFunction = Callable[[Any, Any], int]


def resolve(name: str) -> Callable[..., Any]:
    """ "package.module:function" -> the function."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


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
    agent = multiprocessing.parent_process()
    if agent is not None and not agent.is_alive():  # they ended before, on a busy machine
        os._exit(PEER_LOST)
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


def place_of(position: Any) -> tuple[int, ...] | None:
    """What a program may look at while it is imported."""
    return position and (position.rank, position.local_rank, position.world_size, position.nodes)


def gpu_of(position: Any) -> int | None:
    """Whose GPU a rank has: that of its number on the node."""
    return position and int(position.local_rank)


def nothing_of(_position: Any) -> None:
    """Any process may become any rank."""


@dataclass
class _Worker:
    process: ForkServerProcess
    lifeline: Connection
    expected: Any  # the position that it was warmed up for


class Workers:
    """This node's ranks of one generation after another, running `function` ("module:name"). Not thread-safe.

    Each rank is a new process; while a generation trains, `stand_by` forks those of the next in advance,
    which call `warm_up(job, expected position)` ("module:name") before they wait. `bound_to` says what of its
    expected position a standby is bound to by that: it is taken for no other.
    """

    def __init__(
        self,
        function: str,
        job: Any,
        memories: Sequence[NodeMemory],
        warm_up: str | None = None,
        bound_to: Callable[[Any], object] = nothing_of,
    ) -> None:
        self._arguments = function, warm_up, job, tuple(memories)
        self._bound_to = bound_to
        self._positions: Mapping[int, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Worker] = {}
        self._standby: list[_Worker] = []

    def start(self, positions: Mapping[int, Any]) -> dict[int, int]:
        """Start one process per local rank; {local rank: pid}."""
        self._ranks, self._positions = {}, positions
        with still("importing what the ranks need"):  # the process that they are forked from is at it
            for local_rank, position in positions.items():
                self._ranks[local_rank] = rank = self._take_standby(position) or self._fork(position)
                rank.lifeline.send(position)
        return {local_rank: int(rank.process.pid or 0) for local_rank, rank in self._ranks.items()}

    def stand_by(self, count: int) -> None:
        """Fork one more process for the next generation, unless `count` are waiting (takes about 30 ms).

        One that is bound to what no rank of this generation has (its node has another place now) leaves.
        """
        bounds = {self._bound_to(position) for position in self._positions.values()}
        for worker in [each for each in self._standby if self._bound_to(each.expected) not in bounds]:
            worker.lifeline.close()
            self._standby.remove(worker)
        if len(self._standby) < count:
            taken = {place_of(worker.expected) for worker in self._standby}
            free = [each for each in self._positions.values() if place_of(each) not in taken]
            self._standby.append(self._fork(free[0] if free else None))

    def _take_standby(self, position: Any) -> "_Worker | None":
        for worker in list(self._standby):
            if worker.process.exitcode is not None:
                self._standby.remove(worker)
                worker.lifeline.close()
            elif self._bound_to(worker.expected) == self._bound_to(position):
                self._standby.remove(worker)
                return worker
        return None

    def _fork(self, expected: Any = None) -> "_Worker":
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_worker_main, args=(*self._arguments, theirs, expected))
        start(process)
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
        if GPU_FAILED in codes.values() and self._bound_to is gpu_of:
            self.dismiss()  # the GPU may have failed for those that have opened it, too
        return codes

    def dismiss(self) -> None:
        """Those on standby leave: there is no next generation, or it has to begin with new processes."""
        for worker in self._standby:
            worker.lifeline.close()
        deadline = time.monotonic() + DISMISSED_SECONDS
        for worker in self._standby:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:  # it imports, or opens a GPU that hangs
                worker.process.kill()
        self._standby = []
