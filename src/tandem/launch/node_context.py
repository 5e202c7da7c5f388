"""Define the context of an agent: its node's part of the job, and its restart budget."""

from dataclasses import dataclass
from typing import Any

from tandem.checkpoint.decision import ResumeDecision
from tandem.config.slices import LaunchConfig
from tandem.distributed.position import Connection, Grant, Position
from tandem.launch.generation_sync import ranks_store
from tandem.launch.store_endpoint import StoreEndpoint
from tandem.launch.view import NodeView
from tandem.launch.workers import Workers
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir
from tandem.run.lease import Lease
from tandem.signals import StopFlag
from tandem.work.base import Workload


@dataclass
class RestartBudget:
    """The restart budget that this node has used in this launch.

    A failure counts once, however many ranks it ends.
    """

    incidents_allowed: int
    incidents: int = 0
    generations: int = 0

    @property
    def is_spent(self) -> bool:
        return self.incidents > self.incidents_allowed

    def __str__(self) -> str:
        return f"the restart budget (--max-restarts {self.incidents_allowed})"


@dataclass(frozen=True)
class NodeContext:
    """This node's part of a job, which all its agents share.

    `lease` is the lease on the run directory; only node 0's has a token.
    """

    run: RunDir
    placement: Placement
    nproc: int
    config: LaunchConfig
    workers: Workers
    view: NodeView
    stop: StopFlag
    resume: ResumeDecision
    lease: Lease
    endpoint: StoreEndpoint
    work: Workload

    def positions(self, group: Any) -> dict[int, Position]:
        """Return the positions of this node's ranks in torch's `group`, by local rank."""
        return {worker.local_rank: self._position(worker, group) for worker in group.workers}

    def _position(self, worker: Any, group: Any) -> Position:
        placement = self.placement
        return Position(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            world_size=worker.world_size,
            local_world_size=self.nproc if self.work.has_own_store else 1,
            node_rank=group.group_rank,
            nodes=group.group_world_size,
            ranks_on_host=self.nproc * (placement.nodes if placement.nodes_share_host else 1),
            platform=placement.platform,
            node_name=placement.local_name or "localhost",
        )

    def connection(self, prefix: str, store: Any) -> Connection:
        """Return how the ranks of a generation connect: under `prefix` in the agents' store.

        If they have a separate store, its address is in the `store` of the generation. Raises StoreLostError.
        """
        master = self.endpoint.of_ranks(*ranks_store(store)) if self.work.has_own_store else None
        return Connection(
            store=(*self.endpoint.address, prefix),
            init="store",
            master=master,
            patience=self.config.master_timeout,
        )

    def grant(self, restart: int, resume: ResumeDecision) -> Grant:
        """Return what this node's ranks get from their agent in the generation after `restart` restarts."""
        socket = str(self.view.socket_path)
        fewest, _ = self.placement.elastic or (None, None)
        return Grant(restart, socket, resume, self.lease.token, fewest_nodes=fewest)
