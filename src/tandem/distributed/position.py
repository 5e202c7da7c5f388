"""Define what a rank knows at its start: its position, how to connect, and what its agent passes to it.

This module does not import torch, so it can be used before any other import. See
docs/architecture.md#workloads.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.node_memory import NodeMemory
from tandem.run.lease import Token


@dataclass(frozen=True)
class Position:
    """The position of this process in the job.

    `device` is this rank's GPU among those it sees, if that is not its local rank.
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
    device: int | None = None

    @property
    def gpu(self) -> int:
        """The index of this process's GPU among those it sees."""
        return self.local_rank if self.device is None else self.device

    def __str__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}"
        node = f"node {self.node_rank} of {self.nodes}"
        return f"{rank} on {node} ({self.node_name})"


@dataclass(frozen=True)
class Connection:
    """How a rank finds the other ranks.

    `store` is (host, port, prefix) of the agents' store. If it is None, `init` determines how the group is
    found: "env" (torchrun's variables), "alone" (a single process), "master" (rank 0 hosts a store) or the
    address of a file that all ranks can reach, "file:///PATH".

    `patience` is how many seconds ranks wait for each other and for their connections. `job` separates ranks
    of different jobs that use the same store.
    """

    store: tuple[str, int, str] | None = None
    init: str = "alone"
    master: tuple[str, int] | None = None
    patience: float = 300.0
    job: str = ""


REGIONS = 3
"""Memory regions per rank, see `Grant.memories`."""


@dataclass(frozen=True)
class Grant:
    """What an agent passes to its ranks; the same for all ranks of the node in one generation.

    `resume`: where the run resumes, decided once before any rank starts; only rank 0 uses it. `owner`: the
    fencing token to check at each publication in the run directory; None if nothing is written there.

    `memories`: shared memory that outlives the ranks. One region per rank for its part of the state that is
    equal on all ranks, then one region per rank for the rank's own state. Last, one region per rank for
    copies of another node's own state. Empty without an agent.

    `fewest_nodes`: how many nodes the job needs to continue (`--elastic`); None if it needs all.
    """

    restart: int = 0
    sample_socket: str | None = None
    resume: ResumeDecision = ResumeDecision("fresh")
    owner: Token | None = None
    memories: tuple[NodeMemory, ...] = ()
    fewest_nodes: int | None = None

    @property
    def folder(self) -> Path:
        """The agent's directory on this node, which is removed with it; without an agent, the current one."""
        return Path(self.sample_socket or ".").parent

    @property
    def imports_file(self) -> Path:
        """The record of what this node's ranks have imported (`code_files.write_code`)."""
        return self.folder / "imports.json"

    @property
    def shared_memories(self) -> tuple[NodeMemory, ...]:
        """The regions of all ranks of the node, for state that is equal on all ranks of the job."""
        return self.memories[: len(self.memories) // REGIONS]

    def own_memories(self, local_rank: int) -> tuple[NodeMemory, ...]:
        """Return the region of that rank's own state; empty without an agent."""
        return self._regions(1, local_rank)

    def copy_memories(self, local_rank: int) -> tuple[NodeMemory, ...]:
        """Return the region with that rank's copies of a neighbor's state; empty without an agent."""
        return self._regions(2, local_rank)

    def private_memories(self, local_rank: int) -> tuple[NodeMemory, ...]:
        """Return both of these regions; empty without an agent."""
        return *self.own_memories(local_rank), *self.copy_memories(local_rank)

    def memories_of(self, local_rank: int) -> tuple[NodeMemory, ...]:
        """Return all regions that this rank writes, its part of the shared ones first."""
        return *self.shared_memories[local_rank:][:1], *self.private_memories(local_rank)

    def _regions(self, kind: int, local_rank: int) -> tuple[NodeMemory, ...]:
        index = kind * len(self.memories) // REGIONS + local_rank
        return self.memories[index : index + 1]

    @property
    def had_gpu(self) -> bool:
        """True if ranks of this node trained on GPUs in an earlier generation under the same agent."""
        note = self._gpu_note
        return self.restart > 0 and note is not None and note.exists()

    def note_gpu(self) -> None:
        """Record that this rank trains on a GPU, so that later generations expect it."""
        # Without the note, a later generation only reports a lost GPU as a wrong setting.
        with suppress(OSError):
            if self._gpu_note is not None:
                self._gpu_note.touch()

    @property
    def _gpu_note(self) -> Path | None:
        return self.folder / "had-gpu" if self.sample_socket else None


@dataclass(frozen=True)
class RankStart:
    """All that a rank gets when it starts, as one value that an agent can send to its process."""

    position: Position = Position()
    connection: Connection = Connection()
    grant: Grant = Grant()

    def with_memories(self, memories: Sequence[NodeMemory]) -> "RankStart":
        """Return the same start with these memories, which a process inherits instead of receiving them."""
        return replace(self, grant=replace(self.grant, memories=tuple(memories)))


@dataclass
class Launched:
    """A script that runs as a rank in this process, and its interface to the runner.

    A script that reports its own steps calls `hand_over` and sets `close`: when the script ends,
    `close(code)` returns the exit code. It raises TandemError.
    """

    start: RankStart
    hand_over: Callable[[], None]
    close: Callable[[int], int] = lambda code: code


launched: Launched | None = None
"""Set before the script runs; None if tandem has not started this process as a rank."""
