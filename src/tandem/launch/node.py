"""`tandem launch` on one node: from its placement to its exit code, once per node of the job."""

import contextlib
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.memory import NodeMemory
from tandem.checkpoint.storage.copies import Copies, local_folder
from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED, TandemError
from tandem.launch.run_dir import decide, prepare_run_dir
from tandem.launch.scratch import scratch
from tandem.launch.workers import Workers, record_collectives, start_fork_server, use_loopback
from tandem.log import setup
from tandem.platforms.placement import Placement
from tandem.report.access import Access, load_access
from tandem.signals import StopFlag

log = logging.getLogger("tandem.launch")


def run_this_node(
    settings: Settings, placement: Placement, rank_function: str, state_dir: Path | None, stop: StopFlag
) -> int:
    """Everything one node does in a run; the exit code (see `errors`)."""
    if placement.nodes_share_host or placement.nodes == 1:
        use_loopback()
    record_collectives()
    start_fork_server([rank_function.partition(":")[0]])  # it imports torch while this process does
    from tandem.launch.rendezvous import announce  # and torch with it

    try:
        prepared = _prepare(settings, placement)
    except TandemError as error:
        log.error("%s", error)
        announce(placement, error.exit_code)
        return error.exit_code
    if prepared.decision.kind == "complete":
        announce(placement, FINISHED)
        return FINISHED
    return _run_agent(settings, placement, rank_function, state_dir, stop, prepared)


class _Prepared(NamedTuple):
    decision: ResumeDecision = ResumeDecision("fresh")
    access: Access | None = None
    copies: Copies | None = None  # of what this node writes, when the run directory is an object store


def _prepare(settings: Settings, placement: Placement) -> _Prepared:
    """What can be wrong before any rank starts; the first node also decides where the run begins.

    Raises TandemError.
    """
    from tandem.tasks.base import load_task

    prepared = _Prepared()
    if placement.node_rank == 0:
        access, decision = load_access(settings.metrics), decide(settings)
        if decision.kind == "complete":
            return _Prepared(decision)
        prepared = _Prepared(decision, access, prepare_run_dir(settings))
    load_task(settings.run.task, settings.run.task_fields, settings.data.data_dir, settings.data.download)
    if placement.node_rank == 0:
        log_file = local_folder(str(settings.run.run_dir)) / "log" / "node-0.log"
        setup(log_file, None, 0, True, settings.telemetry.log_format == "json")
    return prepared


def _run_agent(
    settings: Settings,
    placement: Placement,
    rank_function: str,
    state_dir: Path | None,
    stop: StopFlag,
    prepared: _Prepared,
) -> int:
    """The agent, and beside it what shows the run to the outside."""
    from tandem.launch.agent import Node, run_agent
    from tandem.launch.view import NodeView

    run_dir, nproc = local_folder(str(settings.run.run_dir)), placement.nproc or _ranks_for_gpus(settings)
    memories = [NodeMemory() for _ in range(nproc)]
    warm_up = rank_function.partition(":")[0] + ":warm_up"
    workers = Workers(rank_function, settings.to_dict(), memories, warm_up)
    with (
        scratch() as folder,
        contextlib.closing(
            NodeView(settings, placement, state_dir, folder, run_dir, prepared.access, stop)
        ) as view,
    ):
        log.info("%s", placement)
        report = run_agent(Node(placement, nproc, settings.launch, workers, view, stop, prepared.decision))
        if report.code not in (FINISHED, STOPPED):
            said_already = report.code in (1, 2) and placement.node_rank == 0  # by rank 0, which is here
            level = logging.INFO if said_already else logging.ERROR
            log.log(level, "ended with code %d: %s", report.code, report.reason)
        view.ended(report.code, report.reason, report.generations)
        if prepared.copies is not None:
            prepared.copies.push()
        view.linger(settings.metrics.metrics_linger, lambda: bool(stop))
        return report.code


def _ranks_for_gpus(settings: Settings) -> int:
    """`--nproc auto`: one rank per GPU, else one."""
    if settings.compute.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def with_port(placement: Placement) -> Placement:
    """A node alone, and simulated ones, need no agreed port: take a free one."""
    if placement.master_port:
        return placement
    with socket.socket() as probe:
        probe.bind((placement.master_host, 0))
        return replace(placement, master_port=int(probe.getsockname()[1]))
