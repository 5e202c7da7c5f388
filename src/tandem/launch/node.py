"""`tandem launch`: this node's part of a run, from the settings to the exit code.

On a cluster one process per node calls `run_this_node`. On a laptop `--nodes N` starts N of them as
processes of their own (`simulate`), each with an address of its own, as a cluster would.
"""

import contextlib
import ctypes
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.memory import NodeMemory
from tandem.checkpoint.storage import address
from tandem.checkpoint.storage.copies import Copies, local_folder, make_folder
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED, ConfigError, TandemError
from tandem.launch.scratch import scratch
from tandem.launch.view import NodeView
from tandem.launch.workers import (
    RankFunction,
    RankProcesses,
    job_code,
    record_collectives,
    start_fork_server,
    use_loopback,
)
from tandem.log import setup
from tandem.platforms.placement import Placement
from tandem.signals import StopFlag
from tandem.telemetry.journal import write_json_atomic
from tandem.timeouts import SUPERVISE_SECONDS

log = logging.getLogger("tandem.launch")

PR_SET_PDEATHSIG = 1


def resolve_run_dir(settings: Settings, placement: Placement, now: float) -> Settings:
    """The settings with an absolute run directory; the default with the time in it is for laptops only."""
    run_dir = settings.run_dir
    if run_dir is None:
        if placement.platform != "none":
            raise ConfigError(
                f"no run directory is given, and on {placement.platform} all nodes need the same one; "
                "give --run-dir DIR (on the shared volume) or TANDEM_RUN_DIR"
            )
        name = settings.task.rpartition(":")[2] if ":" in settings.task else settings.task
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}"
    if isinstance(where := address(run_dir), Path):
        run_dir = where.absolute()
    return settings.replace(run_dir=run_dir, data_dir=settings.data_dir.absolute())


def prepare_run_dir(settings: Settings) -> Copies:
    """Make the run directory, write config.json; the copies of what the run writes. Raises ConfigError."""
    where, copies = address(str(settings.run_dir)), Copies(str(settings.run_dir))
    folder = local_folder(where)
    try:
        make_folder(folder)
        write_json_atomic(folder / "config.json", settings.to_dict())
        copies.begin((folder / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {where}: {error.strerror or error}; give another --run-dir"
        ) from error
    if folder != where:
        log.info("logs and all that stays on this machine are in %s", folder)
    return copies


def simulate(
    settings: Settings,
    placement: Placement,
    argv: Sequence[str],
    environ: Mapping[str, str],
    stop: StopFlag,
) -> int:
    """Run `placement.nodes` nodes on this machine; the job's exit code.

    Node 0 keeps the terminal, the others write to RUN_DIR/log/node-N.log. A node killed by a signal is
    started again, as a cluster's platform would, up to --max-restarts times.
    """
    run_dir = local_folder(str(settings.run_dir))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    gpus = _gpus(environ)
    nodes = [
        _SimulatedNode(
            [*argv, "--nodes", str(placement.nodes), "--node-rank", str(index)]
            + ["--master", f"{placement.master_host}:{port}", "--run-dir", str(settings.run_dir)]
            + ["--log-format", settings.log_format],
            None if index == 0 else run_dir / "log" / f"node-{index}.log",
            {**environ, **_share(gpus, index, placement.nodes)},
        )
        for index in range(placement.nodes)
    ]
    for node in nodes:
        node.start()
    restarts_left = settings.max_restarts
    forwarded = False
    while any(node.code() is None for node in nodes):
        time.sleep(SUPERVISE_SECONDS)
        if stop and not forwarded:
            forwarded = True
            for node in nodes:
                node.signal(stop.signal_number or signal.SIGTERM)
        for index, node in enumerate(nodes):
            if node.was_killed() and not stop and restarts_left > 0 and _others_run(nodes, index):
                restarts_left -= 1
                log.warning("node %d was killed (%s): starting it again", index, node.code())
                node.start("--resume", "auto")  # whatever this launch began with, it goes on now
    return job_code([code for node in nodes if (code := node.code()) is not None])


def _others_run(nodes: Sequence["_SimulatedNode"], index: int) -> bool:
    others = [node for position, node in enumerate(nodes) if position != index]
    return not others or any(node.code() is None or node.was_killed() for node in others)


class _SimulatedNode:
    """One `tandem launch` process that stands for a node."""

    def __init__(self, arguments: Sequence[str], output: Path | None, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "tandem", "launch", *arguments]
        self._output, self._environment = output, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with contextlib.ExitStack() as stack:
            target = None
            if self._output is not None:
                self._output.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(self._output.open("ab"))
            self._process = subprocess.Popen(
                [*self._command, *more],
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                env=dict(self._environment),
                preexec_fn=stop_with_parent,
            )

    def code(self) -> int | None:
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def was_killed(self) -> bool:
        return self._process is not None and (self._process.poll() or 0) < 0

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def stop_with_parent() -> None:
    """In the child: get SIGTERM when the launcher dies, however it dies (Linux: prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _share(gpus: Sequence[str], index: int, nodes: int) -> dict[str, str]:
    """This simulated node's GPUs; with fewer GPUs than nodes the rest trains on CPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index::nodes])} if gpus else {}


def run_this_node(
    settings: Settings, placement: Placement, rank_function: str, state_dir: Path | None, stop: StopFlag
) -> int:
    """Everything one node does in a run; the exit code (see `errors`)."""
    if placement.nodes_share_host or placement.nodes == 1:
        use_loopback()
    record_collectives()
    module = rank_function.partition(":")[0]
    start_fork_server([module])
    from tandem.launch.agent import run_node
    from tandem.launch.generations import AgentOptions
    from tandem.launch.rendezvous import announce
    from tandem.report.access import load_access
    from tandem.tasks.base import load_task

    run_dir, is_first = local_folder(str(settings.run_dir)), placement.node_rank == 0
    nproc = placement.nproc or _ranks_for_gpus(settings)
    decision, access, copies = ResumeDecision("fresh"), None, None
    try:
        if is_first:
            access = load_access(settings)
            decision = decide(settings)
            if decision.kind == "complete":
                announce(placement, FINISHED)
                return FINISHED
            copies = prepare_run_dir(settings)
        load_task(settings.task, settings.task_fields, settings.data_dir, settings.download)
    except TandemError as error:
        log.error("%s", error)
        announce(placement, error.exit_code)
        return error.exit_code
    if is_first:
        setup(
            run_dir / "log" / f"node-{placement.node_rank}.log", None, 0, True, settings.log_format == "json"
        )
    with (
        scratch() as folder,
        contextlib.closing(NodeView(settings, placement, state_dir, folder, run_dir, access, stop)) as view,
    ):
        options = AgentOptions(
            nproc=nproc,
            ranks_on_host=nproc * (placement.nodes if placement.nodes_share_host else 1),
            max_restarts=settings.max_restarts,
            master_timeout=settings.master_timeout,
            shutdown_timeout=settings.shutdown_timeout,
            sample_socket=str(view.socket_path),
            resume=decision,
        )
        log.info("%s", placement)
        memories = [NodeMemory() for _ in range(nproc)]
        ranks = RankProcesses(rank_function, settings.to_dict(), memories, f"{module}:warm_up")
        report = run_node(placement, ranks, options, stop, view)
        if report.code not in (FINISHED, STOPPED):
            said_already = report.code in (1, 2) and is_first  # rank 0 is here and has said what is wrong
            log.log(
                logging.INFO if said_already else logging.ERROR,
                "ended with code %d: %s",
                report.code,
                report.reason,
            )
        view.ended(report.code, report.reason, report.worlds_opened)
        if copies is not None:
            copies.push()
        view.linger(settings.metrics_linger, lambda: bool(stop))
        return report.code


def decide(settings: Settings) -> ResumeDecision:
    """Where the run begins, decided once on node 0 before any rank starts, and said in a line each."""
    run_dir = address(str(settings.run_dir))
    decision = decide_resume(settings, CheckpointStore(run_dir / "checkpoints"))
    if decision.kind == "complete":
        log.info(
            "the run in %s is complete at step %d; give more --epochs or --steps to go on",
            run_dir,
            decision.step,
        )
        return decision
    for change in decision.changes:
        log.info("changed since the checkpoint: %s", change)
    if decision.moved_to is not None:
        log.info("earlier checkpoints were moved to %s", decision.moved_to)
    return decision


def _ranks_for_gpus(settings: Settings) -> int:
    """`--nproc auto`: one rank per GPU, else one."""
    if settings.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def with_port(placement: Placement) -> Placement:
    """A node alone needs no agreed port: take a free one."""
    if placement.master_port:
        return placement
    with socket.socket() as probe:
        probe.bind((placement.master_host, 0))
        return replace(placement, master_port=int(probe.getsockname()[1]))


def run_lone_rank(settings: Settings, placement: Placement, rank_function: RankFunction) -> int:
    """Train as one rank without an agent: under torchrun, srun or mpirun, or all alone."""
    from tandem.distributed.group import Position

    run_dir, rank = local_folder(str(settings.run_dir)), placement.rank or 0
    world_size = placement.world_size or 1
    if placement.nodes == 1 or placement.nodes_share_host:
        use_loopback()
    local_size = placement.nproc or 1
    master = (placement.master_host, placement.master_port)
    if world_size > 1 and rank != 0:
        from tandem.launch.rendezvous import wait_for_master

        wait_for_master(*master, settings.master_timeout, lambda: False)
    position = Position(
        rank=rank,
        local_rank=placement.local_rank or 0,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=placement.node_rank,
        nodes=placement.nodes,
        ranks_on_host=local_size,
        platform=placement.platform,
        node_name=placement.local_name or "localhost",
        init="alone" if world_size == 1 else "env" if placement.platform == "torchrun" else "master",
        master=master,
    )
    if rank != 0:
        return rank_function(settings.to_dict(), position)
    from tandem.report.access import load_access

    access = load_access(settings)
    position = replace(position, resume=decide(settings))
    copies = prepare_run_dir(settings)
    with (
        scratch() as folder,
        contextlib.closing(NodeView(settings, placement, None, folder, run_dir, access)) as view,
    ):
        code = rank_function(settings.to_dict(), replace(position, sample_socket=str(view.socket_path)))
        view.ended(code, f"the rank ended with code {code}", 1)
        copies.push()
        view.linger(settings.metrics_linger, lambda: False)
        return code
