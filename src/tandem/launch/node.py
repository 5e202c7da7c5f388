"""Run `tandem launch` on one node: from its placement to its exit code, once per node of the job."""

import contextlib
import logging
import os
import socket
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.node_memory import NodeMemory
from tandem.config import Settings
from tandem.config.slices import ONE_PROCESS
from tandem.distributed.position import REGIONS, Grant
from tandem.errors import FINISHED, STOPPED, CheckpointError, CrashLoopError, TandemError
from tandem.launch.announce_error import write_termination_message
from tandem.launch.fork_server import start_fork_server
from tandem.launch.run_dir import prepare_run_dir, scratch
from tandem.launch.secret import take_key
from tandem.launch.torch_variables import set_for_ranks
from tandem.launch.workers import Workers
from tandem.log import is_quiet, log_if_slow, reporting, setup
from tandem.platforms.detection import Placement
from tandem.process import name_process, without_collection
from tandem.report.otel import OTEL
from tandem.report.web import Access, load_access
from tandem.run.crash_loop import CrashLoop
from tandem.run.directory import RunDir, unwritable
from tandem.run.lease import Lease, held
from tandem.signals import StopFlag, stop_together
from tandem.telemetry.health import HealthLimits, Starting
from tandem.work.base import Workload

if TYPE_CHECKING:
    from tandem.launch.agent import AgentReport
    from tandem.launch.node_context import NodeContext
    from tandem.launch.store_endpoint import StoreEndpoint

log = logging.getLogger("tandem.launch")


def run_this_node(
    run: RunDir,
    settings: Settings,
    placement: Placement,
    work: Workload,
    state_dir: Path | None,
    stop: StopFlag,
    header: str = "",
) -> int:
    """Run one node's part of a job, and return its exit code (see `errors`).

    `header` is printed once nothing is wrong with the settings and the task.
    """
    name_process(f"tandem-node-{placement.node_rank}")
    key = take_key(os.environ)  # removes the variable; ranks must not see the secret
    set_for_ranks(placement.is_one_host, work.has_own_store)
    # `scratch` is a temporary directory for sockets.
    with run.created(not placement.node_rank), scratch() as folder, contextlib.ExitStack() as opened:
        with _reporting_start(settings, state_dir), log_if_slow("importing torch"), without_collection():
            import torch  # noqa: F401
        start_fork_server(work.preload, folder)  # must happen while this process has one thread
        with _reporting_start(settings, state_dir):
            with log_if_slow("importing torch.distributed"), without_collection():
                from tandem.launch.store_endpoint import StoreEndpoint, announce

            endpoint = StoreEndpoint(placement, key)
            try:
                # Node 0 takes the lease on the run directory before it reads anything there: another launch
                # may be writing.
                lease = Lease(run.where)
                if placement.node_rank == 0:
                    lease = opened.enter_context(held(run.where, placement, lambda: bool(stop)))
                prepared = _prepare(run, settings, placement, work, lease)
            except TandemError as error:
                log.error("%s", error)
                write_termination_message(str(error))
                # Without this, the other nodes would wait for this one until --master-timeout.
                announce(endpoint, error.exit_code, str(error), stop)
                return error.exit_code
            if prepared.decision.kind == "complete":
                announce(endpoint, FINISHED, stop=stop)
                return FINISHED
            if header:
                print(header, file=sys.stderr)
        return _run_agent(folder, run, settings, endpoint, work, state_dir, stop, prepared)


def _reporting_start(settings: Settings, state_dir: Path | None) -> AbstractContextManager[object]:
    """Keep the health probes informed while this node does something that takes seconds."""
    if state_dir is None:
        return contextlib.nullcontext()
    return contextlib.closing(
        Starting(state_dir, HealthLimits.from_settings(settings.launch, settings.reliability))
    )


class _Prepared(NamedTuple):
    lease: Lease
    decision: ResumeDecision = ResumeDecision("fresh")
    access: Access | None = None


def _prepare(
    run: RunDir, settings: Settings, placement: Placement, work: Workload, lease: Lease
) -> _Prepared:
    """Check for mistakes before any rank starts; on node 0, also open the run directory.

    Raises TandemError.
    """
    if placement.node_rank != 0:
        work.prepare(placement)
        return _Prepared(lease)
    access = load_access(settings.metrics)
    try:
        decision = work.prepare(placement)
    except CheckpointError as error:
        # A directory that may be neither read nor written is a wrong --run-dir, not a damaged run.
        if lease.problem is not None:
            raise unwritable(run.where, lease.problem) from error
        raise
    if decision is None or decision.kind != "complete":
        # Last, so that an error until here leaves no directory behind.
        prepare_run_dir(run, settings, lease, decision)
        setup(run.node_log(0), None, 0, True, settings.telemetry.log_format == "json")
    return _Prepared(lease, decision or ResumeDecision("fresh"), access)


def _run_agent(
    folder: Path,
    run: RunDir,
    settings: Settings,
    endpoint: "StoreEndpoint",
    work: Workload,
    state_dir: Path | None,
    stop: StopFlag,
    prepared: _Prepared,
) -> int:
    """Run the agent, with the threads that show the run to the outside."""
    with log_if_slow("importing the agent"), without_collection():
        from tandem.checkpoint.snapshot import newest_step
        from tandem.launch.agent import run_agent
        from tandem.launch.node_context import NodeContext
        from tandem.launch.outgoing import TrackerProcesses, trackers_of
        from tandem.launch.view import NodeView

    placement = endpoint.placement
    nproc = placement.nproc or _ranks_for_gpus(settings)
    memories = [NodeMemory() for _ in range(REGIONS * nproc)]  # see `Grant.memories`
    workers = Workers(work.rank_entry, work.job, memories, work.warm_up, work.standby_key, work.standby_code)
    stop_together(workers.signal_all)
    view = NodeView(run, settings, placement, state_dir, folder, prepared.access, stop)
    grant = Grant(memories=tuple(memories))
    own = [region for rank in range(nproc) for region in grant.own_memories(rank)]
    view.newest_snapshot = partial(newest_step, grant.shared_memories, own)
    copies = [region for rank in range(nproc) for region in grant.copy_memories(rank)]
    view.newest_copy = partial(newest_step, (), copies)
    with contextlib.closing(view), contextlib.ExitStack() as opened:
        names = trackers_of(settings, os.environ) if placement.node_rank == 0 else []
        if OTEL in names:
            view.write_for_otel()
        trackers = opened.enter_context(TrackerProcesses(names, run.folder))
        log.info("%s", endpoint.asked)
        config = settings.launch
        decision = prepared.decision
        lease = prepared.lease
        node = NodeContext(
            run, placement, nproc, config, workers, view, stop, decision, lease, endpoint, work
        )
        if placement.node_rank == 0:
            view.tell_outside()
            report = _run_counted(node, CrashLoop(run, lease.confirm_ownership))
        else:
            report = run_agent(node)
        # After a takeover, the run directory belongs to another launch: write nothing more there.
        if lease.confirm_ownership():
            with reporting("show how the run ended"):
                view.ended(report.code, report.reason)
            with reporting("tell the tracker"):
                trackers.ended(report.code, lambda: stop.interrupts > 1)
            with reporting("send the last messages"):
                view.flush_outside(stop)
            with reporting("copy the run's files"):
                if placement.node_rank == 0:
                    run.push()
        if report.code not in (FINISHED, STOPPED):
            said_already = (  # by rank 0, whose log is on this terminal
                report.code in (1, 2)
                and report.generations > 0
                and placement.node_rank == 0
                and work.logs_errors
            )
            level = logging.INFO if said_already else logging.ERROR
            log.log(level, "ended with code %d: %s", report.code, report.reason)
            write_termination_message(f"ended with code {report.code}: {report.reason}")
        is_shown = settings.telemetry.log_format != "json" and not is_quiet()
        # A custom loop, which has a plan, has printed its own summary.
        if placement.node_rank == 0 and is_shown and view.plan is None:
            if line := work.last_line(report.code, view.restarts):
                print(line, file=sys.stderr)
        view.linger(stop)
        return report.code


def _run_counted(node: "NodeContext", starts: CrashLoop) -> "AgentReport":
    """Run the agent of node 0, unless earlier starts have saved nothing new for too long."""
    from tandem.launch.agent import AgentReport, run_agent
    from tandem.launch.store_endpoint import announce

    try:
        starts.begin(node.config.max_crash_loops, lambda: bool(node.stop))
        report = run_agent(node)
    except CrashLoopError as error:
        announce(node.endpoint, error.exit_code, str(error), node.stop)
        report = AgentReport(error.exit_code, str(error), 0)
    starts.end(report.code, report.reason, report.generations)
    return report


def _ranks_for_gpus(settings: Settings) -> int:
    """Return the number of ranks for `--nproc auto`: one per GPU (or group of GPUs), else one.

    A strategy that uses a single process also gets one rank.
    """
    if settings.compute.device == "cpu" or settings.compute.strategy_name in ONE_PROCESS:
        return 1
    import torch

    return max(1, torch.cuda.device_count() // settings.compute.devices_per_rank)


_reserved: list[socket.socket] = []


def with_port(placement: Placement) -> Placement:
    """Reserve a free port as the master's, for a single node or simulated ones, which need no agreed port.

    A bound socket that does not listen keeps the kernel from giving the port away. The store also sets
    SO_REUSEADDR, so it may listen there (Linux: ip(7), socket(7)).
    """
    if placement.master_port:
        return placement
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((placement.master_host, 0))
    _reserved.append(keeper)
    return replace(placement, master_port=int(keeper.getsockname()[1]))
