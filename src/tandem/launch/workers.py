"""Run the worker processes of one node: forked from a warm server, each with a pipe from its agent.

docs/architecture.md#who-decides-restarts describes standby processes.
"""

import contextlib
import io
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tandem.checkpoint.node_memory import NodeMemory
from tandem.distributed.child_processes import killed_child
from tandem.distributed.position import Position, RankStart
from tandem.errors import FINISHED, GPU_FAILED, KILLED, PEER_LOST, STOPPED, shell_code
from tandem.launch.fork_server import UNKNOWN, fork_server_pid, has_exited, start
from tandem.log import log_if_slow
from tandem.process import (
    Process,
    adopt_orphans,
    below,
    end_with_parent,
    is_alive,
    living,
    name_process,
    send,
)
from tandem.script.lifeline import watch_agent_pipe
from tandem.signals import SCHEDULERS_SIGNALS
from tandem.timeouts import (
    DISMISSED_SECONDS,
    END_LOOK_SECONDS,
    JUST_AFTER_SECONDS,
    KILLED_SECONDS,
    LEFT_BEHIND_SECONDS,
)
from tandem.work.base import RankFunction, WarmUp, any_rank, gpu_index, rank_identity

log = logging.getLogger("tandem.agent")

# Send stop signals to a rank's session, that is, to the rank and the processes that it has started.

LOADER = "pt_data_worker"
"""torch's name for the processes of a DataLoader. Their rank needs batches until it has stopped."""


def signal_session(leader: int, number: int) -> list[int]:
    """Send a stop signal to a rank and its descendants; return the processes that have a handler for it.

    Every process of the rank's session gets it, except DataLoader processes and helpers without a handler
    below a process with one: they must serve until that process has stopped. A process without a handler for
    SIGUSR1 or SIGUSR2 gets SIGTERM instead, because the default action would end it without a save.
    """
    session = {pid: each for pid, each in living().items() if each.session == leader}
    heard = list[int]()
    covered = dict[int, bool]()
    if leader not in session:  # it has just been forked and has not yet called setsid
        send(number, [leader])
    for each in _parents_first(session, leader):
        sent = _instead(each.pid, number)
        hears = has_handler(each.pid, sent)
        is_covered = covered.get(each.parent, False)
        covered[each.pid] = hears or is_covered
        if each.name != LOADER and (hears or not is_covered):
            send(sent, [each])
            heard += [each.pid] if hears else []
    return heard


def _instead(pid: int, number: int) -> int:
    """Return the signal for a process: SIGTERM if it has no handler for a scheduler's signal."""
    knows = number not in SCHEDULERS_SIGNALS or has_handler(pid, number)
    return number if knows else signal.SIGTERM


def _parents_first(session: Mapping[int, Process], leader: int) -> list[Process]:
    """Return the processes of a session, parents before children.

    Includes the leader and those whose parent is gone.
    """
    found = [each for each in session.values() if each.pid == leader or each.parent not in session]
    for above in found:  # the list grows while it is iterated over
        found += [each for each in session.values() if each.parent == above.pid and each.pid != leader]
    return found


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has installed a handler for a signal, in any language (SigCgt of proc(5))."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


STAYS = (
    "%s has not exited %g s after SIGKILL: it is stuck in the kernel (GPU driver or file system), and "
    "holds its GPU and memory until it exits; check nvidia-smi and dmesg, and reboot if it does not"
)


def _worker_main(
    function: RankFunction,
    warm_up: WarmUp | None,
    job: Any,
    memories: tuple[NodeMemory, ...],
    lifeline: Connection,
    expected: RankStart | None,
) -> None:
    """Run a worker process: warm up, wait for a position, then run as that rank.

    `expected`: the start that it will most likely receive, if known.
    """
    os.setsid()  # the session identifies processes that it starts
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # replaces the fork server's own handler (descendants.py)
    # The fork server ends with the agent. Its signal works where the pipe's reader would need the GIL.
    end_with_parent(signal.SIGKILL)
    agent = multiprocessing.parent_process()
    # They ended before the call above took effect, on a busy machine.
    if agent is not None and not agent.is_alive():
        os._exit(PEER_LOST)
    name_process("tandem-warming")
    if warm_up is not None:
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            warm_up(job, expected)  # an error here recurs in the rank, and is reported there
    name_process("tandem-standby")
    try:
        # This wait is the standby: it ends with a position, or with the pipe.
        received: RankStart = lifeline.recv()
    except (EOFError, OSError):
        os._exit(PEER_LOST)
    start = received.with_memories(memories)
    name_process(f"tandem-rank-{start.position.rank}")
    watch_agent_pipe(lifeline.fileno())
    try:
        code = function(job, start)
    except RuntimeError as error:  # raised by torch's SIGCHLD handler, in the code that ends the rank
        killed = killed_child(error)
        if killed is None:
            raise
        log.error("%s; ending the rank as if it had been killed", killed[0])
        code = killed[1]
    if code != FINISHED:  # multiprocessing would wait at exit for children that may never end
        for child in multiprocessing.active_children():
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _code_of(exitcode: int | None) -> int | None:
    """Return a rank's shell exit code.

    If the fork server was killed, its ranks were killed with it, and their codes are lost.
    """
    if exitcode is None:
        return None
    return KILLED if exitcode == UNKNOWN and has_exited() else shell_code(exitcode)


@dataclass
class _Worker:
    process: ForkServerProcess
    lifeline: Connection
    expected: RankStart | None  # the start that it was prepared for
    files: object  # `standby_code` when it was forked
    # Processes below it that received a stop signal and have a handler.
    asked: list[int] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """Its shell exit code; None while it runs, or a process below it that was asked to stop.

        A wrapper may exit before its program has saved.
        """
        code = _code_of(self.process.exitcode)
        return None if code in (FINISHED, STOPPED) and any(map(is_alive, self.asked)) else code


def _position_in(start: RankStart | None) -> Position | None:
    return None if start is None else start.position


class Workers:
    """This node's ranks of one generation after another, running `function`. Not thread-safe.

    Each rank is a new process. While a generation trains, `start_standby` forks the processes of the next
    one; they call `warm_up(job, expected start)` before they wait. Both functions are sent to the fork server
    by name, so they must be functions of a module. `standby_key` maps a position to a standby key: a standby
    process only becomes a rank whose position has the same key, because it has already read its rank or
    opened its GPU. `standby_code` returns the state of the files that `warm_up` imports: a standby process
    is discarded if it has changed, so that all ranks run the same code.
    """

    def __init__(
        self,
        function: RankFunction,
        job: Any,
        memories: Sequence[NodeMemory],
        warm_up: WarmUp | None = None,
        standby_key: Callable[[Position | None], object] = any_rank,
        standby_code: Callable[[], object] = lambda: None,
    ) -> None:
        self._arguments = function, warm_up, job, tuple(memories)
        self._standby_key = standby_key
        self._standby_code = standby_code
        self._starts: Mapping[int, RankStart] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Worker] = {}
        self._standby: list[_Worker] = []
        self._pipes = threading.Lock()  # `tell` must not write to a descriptor that `kill` has closed
        adopt_orphans()  # of a fork server that was killed

    def start(self, starts: Mapping[int, RankStart]) -> dict[int, int]:
        """Start one process per local rank; return {local rank: pid}."""
        self._ranks = {}
        self._starts = starts
        self._discard_old_code()
        with log_if_slow("importing modules for the ranks"):  # the fork server is importing them
            for local_rank, each in starts.items():
                self._ranks[local_rank] = rank = self._take_standby(each) or self._fork(each)
                rank.lifeline.send(each)
        return {local_rank: int(rank.process.pid or 0) for local_rank, rank in self._ranks.items()}

    def start_standby(self, count: int) -> None:
        """Fork one more process for the next generation, unless `count` are waiting (takes about 30 ms).

        Discards processes whose key no rank of this generation has, because this node's ranks have changed.
        """
        self._discard_old_code()
        bounds = {self._key(each) for each in self._starts.values()}
        changed = [each for each in self._standby if self._key(each.expected) not in bounds]
        self._discard(changed if self._starts else ())  # a spare has had no ranks yet
        # One per call, so that a training generation keeps its cores.
        if len(self._standby) < count:
            # Choose a position that no standby process is prepared for; without one, the process only imports
            # modules.
            taken = {rank_identity(_position_in(worker.expected)) for worker in self._standby}
            free = [each for each in self._starts.values() if rank_identity(each.position) not in taken]
            self._standby.append(self._fork(free[0] if free else None))

    def _discard(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            # The process reads the end of the pipe and exits.
            worker.lifeline.close()
            self._standby.remove(worker)

    def _discard_old_code(self) -> None:
        """Discard standby processes that have imported files which have changed since."""
        files = self._standby_code()
        self._discard([each for each in self._standby if each.files != files])

    def _key(self, expected: RankStart | None) -> object:
        return self._standby_key(_position_in(expected))

    def _take_standby(self, start: RankStart) -> "_Worker | None":
        for worker in list(self._standby):
            # It died while it waited: it ran out of memory, or was killed.
            if worker.process.exitcode is not None:
                self._standby.remove(worker)
                worker.lifeline.close()
            elif self._key(worker.expected) == self._key(start):
                self._standby.remove(worker)
                return worker
        return None

    def _fork(self, expected: RankStart | None = None) -> "_Worker":
        files = self._standby_code()  # before it imports them
        # The agent keeps only the sending end. When the agent ends, however it ends, the kernel closes the
        # pipe.
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_worker_main, args=(*self._arguments, theirs, expected))
        start(process)
        theirs.close()
        return _Worker(process, ours, expected, files)

    def codes(self) -> dict[int, int | None]:
        """Return {local rank: shell exit code, or None while it runs}."""
        return {local_rank: rank.code for local_rank, rank in self._ranks.items()}

    def aborted(self) -> frozenset[int]:
        """Return the local ranks that SIGABRT ended.

        NCCL's watchdog sends it after a peer is lost. A rank whose own GPU fails exits with the same number
        in a shell, but not by a signal.
        """
        codes = {local_rank: rank.process.exitcode for local_rank, rank in self._ranks.items()}
        return frozenset(local_rank for local_rank, code in codes.items() if code == -signal.SIGABRT)

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a running rank ends."""
        running = [rank.process.sentinel for rank in self._ranks.values() if rank.process.exitcode is None]
        connection.wait(running, seconds)

    def signal(self, number: int) -> None:
        """Send a stop signal to all running ranks and to the processes that they have started."""
        for local_rank, pid in self.pids().items():
            self._ranks[local_rank].asked += signal_session(pid, number)

    def pids(self) -> dict[int, int]:
        """Return {local rank: process ID} of the running ranks."""
        return {
            local_rank: rank.process.pid
            for local_rank, rank in self._ranks.items()
            if rank.process.exitcode is None and rank.process.pid
        }

    def signal_all(self, number: int) -> None:
        """Send a signal to all ranks, to everything that they have started, and to standby processes."""
        forks = fork_server_pid()
        send(number, below(forks) if forks is not None else ())

    def tell(self, pid: int, message: bytes) -> bool:
        """Write a message to the pipe of a running rank, from any thread; return False if it is full or gone.

        Never waits: a program that is not Python reads nothing, and its pipe becomes full.
        """
        with self._pipes:
            for rank in list(self._ranks.values()):
                if rank.process.pid == pid and not rank.lifeline.closed:
                    with contextlib.suppress(OSError):
                        # Writable means that a message of PIPE_BUF bytes fits (pipe(7)).
                        if select.select([], [rank.lifeline], [], 0)[1]:
                            rank.lifeline.send_bytes(message)
                            return True
        return False

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all ranks have ended; return False if the timeout expires first."""
        deadline = time.monotonic() + timeout_seconds
        for rank in self._ranks.values():
            rank.process.join(max(0.0, deadline - time.monotonic()))
        return all(code is not None for code in self.codes().values())

    def kill(self) -> dict[int, int]:
        """Kill the running ranks and their descendants; return the exit codes of all ranks.

        There is nothing left to save, because the ranks have lost their peers.
        """
        # Read the codes before the SIGKILLs below, which would hide how the ranks ended.
        ended = [rank.code for rank in self._ranks.values()]
        # First kill by process: a rank that has just been forked does not lead its process group yet.
        for pid in self.pids().values():
            send(signal.SIGKILL, [pid])
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        # Do this only after a success: processes that a failed rank has started are killed with it.
        if ended and all(code in (FINISHED, STOPPED) for code in ended):
            self._end_helpers()
        self._kill_remaining(KILLED_SECONDS)
        codes = {each: KILLED if code is None else code for each, code in self.codes().items()}
        with self._pipes:
            for rank in self._ranks.values():
                rank.lifeline.close()
        has_lost_gpu = any(rank.process.exitcode == GPU_FAILED for rank in self._ranks.values())
        self._ranks = {}
        if has_lost_gpu and self._standby_key is gpu_index:
            self.end_standby()  # other standby processes may have the failed GPU open, too
        return codes

    def left(self) -> list[Process]:
        """Return the remaining processes of the ranks and all processes that they started.

        After `kill`, these are the ones that cannot be ended.
        """
        alive = living()
        ours = os.getpid()
        forks = fork_server_pid()
        # Standby processes do not count: the next generation needs them.
        spared = {int(worker.process.pid or 0) for worker in self._standby}
        for each in alive.values():  # what this process itself has started stays in its session
            if each.parent == ours and each.session == os.getsid(0) and each.pid != forks:
                spared.add(each.pid)
        return [each for each in below(ours, spared, alive) if each.pid != forks]

    def _end_helpers(self) -> None:
        """Give processes that successful ranks have left running a moment to end by themselves.

        A fork server of multiprocessing ends by itself, just after the rank that started it.
        """
        deadline = time.monotonic() + JUST_AFTER_SECONDS
        while self.left() and time.monotonic() < deadline:
            time.sleep(END_LOOK_SECONDS)
        if left := self.left():
            log.info("the ranks exited and left processes behind: %s", ", ".join(map(str, left)))
            send(signal.SIGTERM, left)
            deadline = time.monotonic() + LEFT_BEHIND_SECONDS
            while self.left() and time.monotonic() < deadline:
                time.sleep(END_LOOK_SECONDS)

    def _kill_remaining(self, limit_seconds: float) -> None:
        """Send SIGKILL until nothing is left, and log what cannot be ended."""
        deadline = time.monotonic() + limit_seconds
        self.wait(limit_seconds)
        while left := self.left():
            if time.monotonic() > deadline:
                for each in left:
                    log.error(STAYS, self._describe(each), limit_seconds)
                return
            send(signal.SIGKILL, left)
            time.sleep(END_LOOK_SECONDS)
            for each in left:  # adopted from a fork server that was killed; reap it
                if each.parent == os.getpid():
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(each.pid, os.WNOHANG)

    def _describe(self, process: Process) -> str:
        for local_rank, rank in self._ranks.items():
            if rank.process.pid == process.pid:
                return f"rank {self._starts[local_rank].position.rank} (process {process.pid})"
        return f"{process}, started by a rank,"

    def end_standby(self) -> None:
        """End the standby processes: no generation follows, or it needs new processes."""
        # Close all pipes first, so that the processes end at the same time, within one limit.
        for worker in self._standby:
            worker.lifeline.close()
        deadline = time.monotonic() + DISMISSED_SECONDS
        for worker in self._standby:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:  # it is importing, or opens a GPU that hangs
                worker.process.kill()
        self._standby = []
