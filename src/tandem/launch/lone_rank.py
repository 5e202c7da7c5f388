"""One rank without an agent: under torchrun, srun or mpirun, started by hand, or all alone."""

import contextlib
from dataclasses import replace

from tandem.checkpoint.storage.copies import local_folder
from tandem.config import Settings
from tandem.distributed.group import Position
from tandem.launch.rendezvous import wait_for_master
from tandem.launch.run_dir import decide, prepare_run_dir
from tandem.launch.scratch import scratch
from tandem.launch.view import NodeView
from tandem.launch.workers import RankFunction, use_loopback
from tandem.platforms.placement import Placement
from tandem.report.access import load_access


def run_lone_rank(settings: Settings, placement: Placement, rank_function: RankFunction) -> int:
    """Train as the rank that the environment says; its exit code. Rank 0 also hosts page and metrics."""
    if placement.nodes == 1 or placement.nodes_share_host:
        use_loopback()
    position = position_of(placement)
    if position.rank != 0:
        wait_for_master(
            placement.master_host, placement.master_port, settings.launch.master_timeout, lambda: False
        )
        return rank_function(settings.to_dict(), position)
    run_dir, access = local_folder(str(settings.run.run_dir)), load_access(settings.metrics)
    position = replace(position, resume=decide(settings))
    copies = prepare_run_dir(settings)
    with (
        scratch() as folder,
        contextlib.closing(NodeView(settings, placement, None, folder, run_dir, access)) as view,
    ):
        code = rank_function(settings.to_dict(), replace(position, sample_socket=str(view.socket_path)))
        view.ended(code, f"the rank ended with code {code}", 1)
        copies.push()
        view.linger(settings.metrics.metrics_linger, lambda: False)
        return code


def position_of(placement: Placement) -> Position:
    """The rank's position; how many ranks share its host is known when its platform started them."""
    world_size = placement.world_size or 1
    return Position(
        rank=placement.rank or 0,
        local_rank=placement.local_rank or 0,
        world_size=world_size,
        local_world_size=placement.nproc or 1,
        node_rank=placement.node_rank,
        nodes=placement.nodes,
        ranks_on_host=placement.nproc or 1,
        platform=placement.platform,
        node_name=placement.local_name or "localhost",
        init="alone" if world_size == 1 else "env" if placement.platform == "torchrun" else "master",
        master=(placement.master_host, placement.master_port),
    )
