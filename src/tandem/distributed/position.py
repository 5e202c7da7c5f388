"""Where a process stands in the job. Imports no torch: a rank may know it before it imports anything."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.memory import NodeMemory
from tandem.run.owner import Token


@dataclass(frozen=True)
class Position:
    """Where this process stands in the job.

    `store` is (host, port, prefix) of the agents' store; None means that `init` tells how the group is
    found: "env" (torchrun's variables), "alone" (a world of one), "master" (rank 0 hosts a store) or the
    address of a file that all ranks reach, "file:///PATH".
    `patience` is how many seconds ranks wait for each other and for their connections.
    `job` keeps ranks of different jobs apart that come to one store. `device` is this rank's GPU among those
    it sees, where that is not its local rank.
    `resume` is where the run begins, decided once before any rank starts; it counts on rank 0.
    `owner` is what each publication in the run directory is checked against; None where nobody writes there.
    `memories` outlive the node's ranks: a region for each rank's part of what is equal on all ranks, then one
    for what each rank has of its own; none without an agent.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    ranks_on_host: int = 1
    platform: str = "none"
    node_name: str = "localhost"
    store: tuple[str, int, str] | None = None
    init: str = "alone"
    master: tuple[str, int] | None = None
    patience: float = 300.0
    job: str = ""
    device: int | None = None
    restart: int = 0
    sample_socket: str | None = None
    resume: ResumeDecision = ResumeDecision("fresh")
    owner: Token | None = None
    memories: tuple[NodeMemory, ...] = ()

    @property
    def shared_memories(self) -> tuple[NodeMemory, ...]:
        """Of all ranks of the node, for what is equal on all ranks of the job."""
        return self.memories[: len(self.memories) // 2]

    @property
    def own_memories(self) -> tuple[NodeMemory, ...]:
        """Of this rank alone: one, or none without an agent."""
        place = len(self.memories) // 2 + self.local_rank
        return self.memories[place : place + 1]

    @property
    def gpu(self) -> int:
        """Which of the GPUs that this process sees is its own."""
        return self.local_rank if self.device is None else self.device

    @property
    def had_gpu(self) -> bool:
        """Whether ranks of this node have trained on GPUs in an earlier generation, under the same agent."""
        note = self._gpu_note
        return self.restart > 0 and note is not None and note.exists()

    def note_gpu(self) -> None:
        """This rank trains on a GPU: later generations expect it to be there."""
        with suppress(OSError):
            if self._gpu_note is not None:
                self._gpu_note.touch()

    @property
    def _gpu_note(self) -> Path | None:
        """Beside the agent's socket, in a folder that is gone with the agent."""
        return Path(self.sample_socket).with_name("had-gpu") if self.sample_socket else None

    def __str__(self) -> str:
        rank, node = f"rank {self.rank} of {self.world_size}", f"node {self.node_rank} of {self.nodes}"
        return f"{rank} on {node} ({self.node_name})"


@dataclass
class Launched:
    """A script that this process runs as the rank at `position`, and what passes between it and who runs it.

    A script that says itself from now on which step it is in calls `hand_over`, and sets `close`: at the end
    of the script `close(code)` gives the code to end with. It raises TandemError.
    """

    position: Position
    hand_over: Callable[[], None]
    close: Callable[[int], int] = lambda code: code


launched: Launched | None = None
"""Set before the script runs; None where nobody has started this process as a rank of ours."""
