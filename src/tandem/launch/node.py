"""Run `tandem launch` on one node: from its placement to its exit code, once per node of the job."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.memory import NodeMemory
from tandem.config import Settings, TaskJob
from tandem.config.slices import ONE_PROCESS
from tandem.errors import FINISHED, MISCONFIGURED, STOPPED, ConfigError, CrashLoopError, TandemError
from tandem.launch.fork_server import start_fork_server
from tandem.launch.misplaced import hint
from tandem.launch.program import job_of
from tandem.launch.run_dir import decide, prepare_run_dir
from tandem.launch.scratch import scratch
from tandem.launch.secret import take_key
from tandem.launch.termination import leave_word
from tandem.launch.tracker import TrackerProcess
from tandem.launch.variables import set_for_ranks
from tandem.launch.workers import Workers, gpu_of, nothing_of, place_of
from tandem.log import is_quiet, reporting, setup
from tandem.platforms.placement import Placement
from tandem.process import name_process
from tandem.report.access import Access, load_access
from tandem.rotation import tail
from tandem.run.crash_loop import CrashLoop
from tandem.run.directory import RunDir
from tandem.run.lease import Claim
from tandem.script.job import Program
from tandem.signals import StopFlag, stop_together
from tandem.silence import still
from tandem.telemetry.health import Limits, Starting
from tandem.words import shown

if TYPE_CHECKING:
    from tandem.launch.agent import AgentReport
    from tandem.launch.generations import NodeAgent
    from tandem.launch.meeting_place import MeetingPlace
    from tandem.launch.part import Node

log = logging.getLogger("tandem.launch")


class Work(NamedTuple):
    """What a node's ranks run.

    `rank_function` and `warm_up` are "module:name"; both receive `job`. The fork server imports `preload`
    before it forks the first rank. `header` is printed once nothing is wrong with the settings and the task.
    """

    rank_function: str
    warm_up: str
    job: Any
    preload: Sequence[str]
    is_script: bool = False
    header: str = ""


def task_work(rank_function: str, settings: Settings, chosen: Collection[str]) -> Work:
    """Return the work of training a task. `chosen`: the names of the settings that were set explicitly."""
    module = rank_function.partition(":")[0]
    job = TaskJob(settings.to_dict(), frozenset(chosen))
    return Work(rank_function, f"{module}:warm_up", job, ["tandem.launch.warm", module])


def script_work(program: Program, run: RunDir, settings: Settings, chosen: Collection[str]) -> Work:
    """Return the work of running a user script; `chosen` as for `task_work`.

    For a new interpreter the fork server imports only what starts it, because exec drops the modules.
    """
    job, module = job_of(program, run, settings, chosen), "tandem.script.rank"
    cold = job.cold or program.kind == "command"
    preload = [module] if cold else ["tandem.launch.warm", module]
    return Work(f"{module}:run_rank", f"{module}:warm_up", job, preload, is_script=True)


def run_this_node(
    run: RunDir,
    settings: Settings,
    placement: Placement,
    work: Work,
    state_dir: Path | None,
    stop: StopFlag,
) -> int:
    """Do everything that one node does in a run, and return its exit code (see `errors`)."""
    name_process(f"tandem-node-{placement.node_rank}")
    key = take_key(os.environ)  # the variable goes; ranks must not see the secret
    set_for_ranks(placement.is_one_host, work.is_script)
    # Sets the umask, which ranks inherit.
    with run.made(not placement.node_rank), scratch() as folder:
        return _run_in(folder, run, settings, placement, work, state_dir, stop, key)


def _run_in(
    folder: Path,
    run: RunDir,
    settings: Settings,
    placement: Placement,
    work: Work,
    state_dir: Path | None,
    stop: StopFlag,
    key: bytes | None,
) -> int:
    """Do the same in `folder`, a temporary directory for sockets."""
    with contextlib.ExitStack() as opened:
        with _saying_that_it_starts(settings, state_dir), still("importing torch"):
            import torch  # noqa: F401
        start_fork_server(work.preload, folder)  # must happen while this process has one thread
        with _saying_that_it_starts(settings, state_dir):
            with still("importing torch.distributed"):
                from tandem.launch.meeting_place import MeetingPlace, announce

            place = MeetingPlace(placement, key)
            try:
                # Node 0 takes the lease on the run directory before it reads anything there: another launch
                # may be writing.
                mine = Claim(run.where)
                if placement.node_rank == 0:
                    mine = opened.enter_context(run.lease(placement, lambda: bool(stop)))
                prepare = _prepare_script if work.is_script else _prepare
                prepared = prepare(run, settings, placement, mine)
            except TandemError as error:
                log.error("%s", error)
                leave_word(str(error))
                # Without this, the other nodes would wait for this one until --master-timeout.
                announce(place, error.exit_code, str(error), stop)
                return error.exit_code
            if prepared.decision.kind == "complete":
                announce(place, FINISHED, stop=stop)
                return FINISHED
            if work.header:
                print(work.header, file=sys.stderr)
        return _run_agent(folder, run, settings, place, work, state_dir, stop, prepared)


def _saying_that_it_starts(settings: Settings, state_dir: Path | None) -> AbstractContextManager[object]:
    """Keep the health probes informed while this node does something that takes seconds."""
    if state_dir is None:
        return contextlib.nullcontext()
    return contextlib.closing(Starting(state_dir, Limits.asked(settings.launch, settings.reliability)))


class _Prepared(NamedTuple):
    claim: Claim
    decision: ResumeDecision = ResumeDecision("fresh")
    access: Access | None = None


def _prepare(run: RunDir, settings: Settings, placement: Placement, mine: Claim) -> _Prepared:
    """Check what can be wrong before any rank starts; on node 0, also decide where the run resumes.

    Raises TandemError.
    """
    from tandem.tasks.base import load_task

    asked, data = settings.run, settings.data
    prepared = _Prepared(mine)
    if placement.elastic is not None and data.batch_shares is not None:
        raise ConfigError(
            f"--batch-shares {data.batch_shares} needs a fixed number of ranks, but --elastic changes it; "
            "use only one of them"
        )
    if placement.node_rank == 0:
        access = load_access(settings.metrics)
        with still("reading the checkpoints"):
            decision = decide(run, settings)
        if decision.kind == "complete":
            return _Prepared(mine, decision)
        prepared = _Prepared(mine, decision, access)
    with still(f"importing the task {asked.task}"):
        load_task(asked.task, asked.task_fields, data.data_dir, data.download)
    if placement.node_rank == 0:  # last, so that an error until here leaves no directory behind
        prepare_run_dir(run, settings, mine, prepared.decision)
    _log_of_first_node(run, settings, placement)
    return prepared


def _prepare_script(run: RunDir, settings: Settings, placement: Placement, mine: Claim) -> _Prepared:
    """Do the same for a script, which decides by itself where it resumes. Raises TandemError."""
    if placement.node_rank != 0:
        return _Prepared(mine)
    if settings.launch.warm_gpu:
        log.warning("--warm-gpu has no effect on a script: scripts open their GPU themselves")
    access = load_access(settings.metrics)
    prepared = _Prepared(mine, access=access)
    prepare_run_dir(run, settings, mine, None)
    _log_of_first_node(run, settings, placement)
    return prepared


def _log_of_first_node(run: RunDir, settings: Settings, placement: Placement) -> None:
    if placement.node_rank == 0:
        setup(run.node_log(0), None, 0, True, settings.telemetry.log_format == "json")


def _run_agent(
    folder: Path,
    run: RunDir,
    settings: Settings,
    place: "MeetingPlace",
    work: Work,
    state_dir: Path | None,
    stop: StopFlag,
    prepared: _Prepared,
) -> int:
    """Run the agent, together with what shows the run to the outside."""
    with still("importing the agent"):
        from tandem.launch.agent import run_agent
        from tandem.launch.generations import NodeAgent
        from tandem.launch.part import Node
        from tandem.launch.script_agent import ScriptAgent
        from tandem.launch.view import NodeView

    placement = place.placement
    nproc = placement.nproc or _ranks_for_gpus(settings)
    memories = [NodeMemory() for _ in range(2 * nproc)]  # two per rank, see `Position.memories`
    bound_to = place_of if work.is_script else gpu_of if settings.launch.warm_gpu else nothing_of
    workers = Workers(work.rank_function, work.job, memories, work.warm_up, bound_to)
    stop_together(workers.signal_all)
    view = NodeView(run, settings, placement, state_dir, folder, prepared.access, stop)
    with contextlib.closing(view), contextlib.ExitStack() as opened:
        tracker = (
            opened.enter_context(TrackerProcess(settings, run.folder)) if placement.node_rank == 0 else None
        )
        log.info("%s", place.asked)
        config, decision, mine = settings.launch, prepared.decision, prepared.claim
        node = Node(run, placement, nproc, config, workers, view, stop, decision, mine, place)
        agent: type[NodeAgent] = ScriptAgent if work.is_script else NodeAgent
        if placement.node_rank == 0:
            report = _run_counted(node, agent, run.crash_loop(mine.look))
        else:
            report = run_agent(node, agent)
        # After a takeover, the run directory belongs to another launch: write nothing more there.
        if mine.look():
            with reporting("show how the run ended"):
                view.ended(report.code, report.reason)
            with reporting("tell the tracker"):
                if tracker is not None:
                    tracker.ended(report.code, lambda: stop.interrupts > 1)
            with reporting("copy the run's files"):
                if placement.node_rank == 0:
                    run.push()
        if report.code not in (FINISHED, STOPPED):
            said_already = (  # by rank 0, whose log is on this terminal
                report.code in (1, 2)
                and report.generations > 0
                and placement.node_rank == 0
                and not work.is_script
            )
            level = logging.INFO if said_already else logging.ERROR
            log.log(level, "ended with code %d: %s", report.code, report.reason)
            leave_word(f"ended with code {report.code}: {report.reason}")
            if report.code == MISCONFIGURED and work.is_script and placement.node_rank == 0:
                _show_hint(work.job.program, run.rank_log(0))
        elif work.is_script and placement.node_rank == 0 and view.plan is None:
            _show_end(run, settings, report.code, view.restarts)
        view.linger(stop)
        return report.code


def _show_hint(program: Program, log: Path) -> None:
    """Print what to type if the script has rejected a flag of tandem that follows it."""
    with contextlib.suppress(OSError):
        said = tail(log, 4000)[0].decode(errors="replace").splitlines()
        if said and (told := hint(program, said[-1])):
            print(f"tandem: {told}", file=sys.stderr)


def _show_end(run: RunDir, settings: Settings, code: int, restarts: int) -> None:
    """Print the last line of a script; a task or custom loop has printed its own summary."""
    if settings.telemetry.log_format != "json" and not is_quiet():
        place = shown(run.where)
        said = f"{settings.run.task} ended with code {code}; restarts: {restarts}; run directory: {place}"
        print(said, file=sys.stderr)


def _run_counted(node: "Node", agent: "type[NodeAgent]", starts: CrashLoop) -> "AgentReport":
    """Run the agent of node 0, unless earlier starts have saved nothing new for too long."""
    from tandem.launch.agent import AgentReport, run_agent
    from tandem.launch.meeting_place import announce

    try:
        starts.begin(node.config.max_crash_loops, lambda: bool(node.stop))
        report = run_agent(node, agent)
    except CrashLoopError as error:
        announce(node.place, error.exit_code, str(error), node.stop)
        report = AgentReport(error.exit_code, str(error), 0)
    starts.end(report.code, report.reason, report.generations)
    return report


def _ranks_for_gpus(settings: Settings) -> int:
    """Return the number of ranks for `--nproc auto`: one per GPU (or group of GPUs), else one.

    A strategy that uses a single process gets one rank, too.
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
