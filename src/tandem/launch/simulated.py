"""Simulate nodes: `tandem launch --nodes N` on a laptop starts N processes that act as nodes.

Each gets a placement and its own loopback address, as on a cluster. All are forked from one process, so torch
is imported once and is in memory once.
"""

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tandem.config import Settings
from tandem.config.slices import LaunchConfig
from tandem.errors import (
    INTERRUPTED_TWICE,
    KILLED,
    MISCONFIGURED,
    PEER_LOST,
    StoppedError,
    job_code,
    shell_code,
    was_killed,
)
from tandem.json_output import WRITER
from tandem.launch.fork_server import (
    UNKNOWN,
    end_fork_server,
    fork_server_pid,
    has_exited,
    start,
    start_fork_server,
)
from tandem.launch.run_dir import scratch
from tandem.launch.this_machine import gpus_of, gpus_per_node
from tandem.launch.torch_variables import set_for_ranks
from tandem.log import log_if_slow, redirect_output
from tandem.platforms.by_hand import unplaced
from tandem.platforms.detection import Placement
from tandem.process import Process, below, end_with_parent, stat_of
from tandem.run.directory import RunDir
from tandem.signals import StopFlag, default_handlers, forwarded_as
from tandem.timeouts import DEAF_NODE_SECONDS, LEAVE_SECONDS, SUPERVISE_SECONDS, TRACKER_END_SECONDS
from tandem.work.base import Workload, signal_name

log = logging.getLogger("tandem.launch")

# A name, not an import, because it imports torch.
AGENT = "tandem.launch.agent"
ENDING_SECONDS = LEAVE_SECONDS + TRACKER_END_SECONDS  # from the end of its ranks until a node has exited


def simulate(
    run: RunDir,
    settings: Settings,
    placement: Placement,
    argv: Sequence[str],
    environ: Mapping[str, str],
    stop: StopFlag,
    work: Workload,
) -> int:
    """Run the nodes of a job on this machine, spares included, and return the job's exit code.

    Node 0 keeps the terminal; the others write to RUN_DIR/log/node-N.log. A node killed by a signal is
    restarted, as a cluster's platform would do, up to --max-restarts times.
    """
    count = placement.nodes + placement.spares
    shares = gpus_per_node(gpus_of(environ), count, placement.nproc, settings.compute)
    nodes = [
        SimulatedNode(
            [*argv, "--nodes", str(placement.nodes), "--node-rank", str(index)]
            + ["--master", f"{placement.master_host}:{placement.master_port}"]
            + ["--run-dir", str(run.where)],
            None if index == 0 else run.node_log(index),
            shares[index],
            work.words,
        )
        for index in range(count)
    ]
    with run.created(), scratch() as folder:
        has_new_logs = run.make_logs()
        set_for_ranks(placement.is_one_host, work.has_own_store)
        try:
            with stop.exit_on_signal():
                imported = start_fork_server([AGENT, *work.preload], folder, keeps=False)
                with log_if_slow("importing modules for nodes and ranks"):
                    imported()
        except StoppedError:
            end_fork_server()
            raise
        for node in nodes:
            node.start()
        _supervise(nodes, settings.launch, stop)
        code = job_code([code for node in nodes if (code := node.code()) is not None])
        if was_killed(code) and nodes[0].code() == PEER_LOST:
            code = PEER_LOST  # a node was lost for good, as node 0's summary shows
        if code == MISCONFIGURED and has_new_logs:
            run.discard_logs_of_refused_launch()
        return code if stop.interrupts < 2 else INTERRUPTED_TWICE


def _supervise(nodes: Sequence["SimulatedNode"], config: LaunchConfig, stop: StopFlag) -> None:
    """Wait until all nodes have ended; forward stop signals, and restart killed nodes.

    Nodes are killed at a second Ctrl-C, or when their time to stop is over; earlier if one is frozen and
    cannot handle the signal. Processes that they started end with them.
    """
    restarts_left = config.max_restarts
    stops_at = float("inf")
    while any(node.code() is None for node in nodes):
        time.sleep(SUPERVISE_SECONDS)
        if stop and stops_at == float("inf"):
            stops_at = time.monotonic() + config.shutdown_timeout + DEAF_NODE_SECONDS
            for node in nodes:
                node.signal(forwarded_as(stop.signal_number or signal.SIGTERM))
        # No process can report how those nodes end, so the job can no longer be supervised.
        if stops_at == float("inf") and any(node.is_cut_off() for node in nodes):
            lost = "the process that forks the nodes was killed, probably because memory ran out"
            log.error("%s; the nodes save and stop; run the same command again to resume", lost)
            stops_at = time.monotonic() + config.shutdown_timeout + DEAF_NODE_SECONDS
        if (late := time.monotonic() - stops_at) > 0:
            here = [index for index, node in enumerate(nodes) if node.code() is None]
            deaf = [index for index in here if late > ENDING_SECONDS or nodes[index].is_frozen()]
            if deaf:
                log.warning("did not stop in time: killing node %s", ", ".join(map(str, deaf)))
            for index in deaf:
                nodes[index].signal(signal.SIGKILL)
        if stop.interrupts > 1:
            log.warning("second Ctrl-C: killing all nodes")
            for node in nodes:
                node.signal(signal.SIGKILL)
            _wait(nodes)
            return
        for index, node in enumerate(nodes):
            # A successor could not take over the position while processes of the killed node are left.
            killed_by = node.killed_by()
            is_to_start = killed_by and not stop and restarts_left > 0 and _others_run(nodes, index)
            if is_to_start and not _left_of(nodes):
                restarts_left -= 1
                log.warning("node %d was killed (%s); restarting it", index, killed_by)
                node.start("--resume", "auto")  # whatever --resume this launch started with


def _wait(nodes: Sequence["SimulatedNode"]) -> None:
    """Wait until killed nodes have ended, so that this launch can remove their temporary files."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(node.code() is None for node in nodes) and time.monotonic() < deadline:
        time.sleep(SUPERVISE_SECONDS)


def _left_of(nodes: Sequence["SimulatedNode"]) -> list[Process]:
    """Return the processes that killed nodes left behind; they soon end by themselves (descendants.py).

    Writers of JSON logs do not count: they are orphans of all nodes, and live nodes still have some.
    """
    left = below(fork_server_pid() or 0, {node.pid for node in nodes if node.code() is None})
    return [each for each in left if each.name != WRITER]


def _others_run(nodes: Sequence["SimulatedNode"], index: int) -> bool:
    # A restarted node would wait in vain for nodes that have ended by themselves.
    others = [node for position, node in enumerate(nodes) if position != index]
    return not others or any(node.code() is None or node.killed_by() for node in others)


class SimulatedNode:
    """A process that acts as a node: `tandem launch` with `arguments`, `variables`, and its own output."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path | None,
        variables: Mapping[str, str],
        program: Sequence[str] = (),
    ) -> None:
        self._arguments = arguments
        self._program = program
        self._output = output
        self._variables = variables
        self._context = multiprocessing.get_context("forkserver")
        self._process: ForkServerProcess | None = None

    def start(self, *more: str) -> None:
        words = [*self._arguments, *more, *self._program]
        default_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._process = self._context.Process(
            target=_run_node, args=(words, self._output, self._variables, default_hangup)
        )
        start(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid or 0 if self._process is not None else 0

    def code(self) -> int | None:
        code = None if self._process is None else self._process.exitcode
        if self.is_cut_off():
            return None if self._state() else PEER_LOST
        if code == -signal.SIGTERM:  # before it could handle the signal; 143 promises a complete stop
            return KILLED
        return code if code is None else shell_code(code)

    def killed_by(self) -> str:
        """Return the name of the signal that killed this node; "" if none did."""
        code = (self._process.exitcode if self._process is not None else None) or 0
        return signal_name(shell_code(code)) if code < 0 else ""

    def is_cut_off(self) -> bool:
        """Return whether no process can report its exit code; it has received SIGTERM then."""
        return self._process is not None and self._process.exitcode == UNKNOWN and has_exited()

    def is_frozen(self) -> bool:
        return self._state() in ("T", "t")

    def signal(self, number: int) -> None:
        if self._process is not None and self.code() is None and self._process.pid:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _state(self) -> str:
        """Return the state of its process, as in proc(5), or "" if it has ended."""
        fields = stat_of(self._process.pid) if self._process is not None and self._process.pid else []
        return fields[0] if fields and fields[0] not in "ZX" else ""


def _run_node(
    words: Sequence[str], output: Path | None, variables: Mapping[str, str], default_hangup: bool
) -> None:
    """Become a node, in a new process forked by the launcher's fork server."""
    stop_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():  # they ended before `stop_with_parent` took effect
        os._exit(PEER_LOST)
    default_handlers(default_hangup)  # `tandem launch` installs its own handlers, which can report the signal
    _use_own_streams(output)
    for name in set(os.environ) - set(unplaced(os.environ)):  # a batch script may have set MASTER_ADDR
        del os.environ[name]
    os.environ.update(variables)
    sys.argv = [sys.argv[0], "launch", *words]
    # Do what `python -m tandem` would do: the command line is in a higher layer.
    importlib.import_module("tandem.cli").main()


def _use_own_streams(output: Path | None) -> None:
    """Read no input, and write to `output` unless it is None."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        redirect_output(output)


def stop_with_parent() -> None:
    """Make the kernel send this process SIGTERM when the launcher, or its fork server, dies."""
    end_with_parent(signal.SIGTERM)
