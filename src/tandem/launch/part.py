"""Define what an agent works with: this node's part of a job."""

from dataclasses import dataclass
from typing import Any

from tandem.checkpoint.decision import ResumeDecision
from tandem.config.slices import LaunchConfig
from tandem.distributed.group import Position
from tandem.launch.meeting_place import MeetingPlace
from tandem.launch.view import NodeView
from tandem.launch.workers import Workers
from tandem.platforms.placement import Placement
from tandem.run.directory import RunDir
from tandem.run.lease import Claim
from tandem.signals import StopFlag


@dataclass(frozen=True)
class Node:
    """This node's part of a job, which all its agents share.

    `claim` is the lease on the run directory; only node 0's has a token.
    """

    run: RunDir
    placement: Placement
    nproc: int
    config: LaunchConfig
    workers: Workers
    view: NodeView
    stop: StopFlag
    resume: ResumeDecision
    claim: Claim
    place: MeetingPlace

    def position(self, worker: Any, group: Any, prefix: str, restart: int) -> Position:
        """Return the position of one local rank: a `worker` of torch's `group`.

        The ranks of the generation connect below `prefix` in the store.
        """
        placement = self.placement
        return Position(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            world_size=worker.world_size,
            node_rank=group.group_rank,
            nodes=group.group_world_size,
            ranks_on_host=self.nproc * (placement.nodes if placement.nodes_share_host else 1),
            platform=placement.platform,
            node_name=placement.local_name or "localhost",
            store=(*self.place.address, prefix),
            init="store",
            patience=self.config.master_timeout,
            restart=restart,
            sample_socket=str(self.view.socket_path),
            resume=self.resume,
            owner=self.claim.token,
        )
