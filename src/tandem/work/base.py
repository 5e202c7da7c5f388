"""Define what the ranks of a job run, as one object that the agent asks.

The agent knows no task, no data and no training: it runs any workload. See docs/architecture.md#workloads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.checkpoint.decision import ResumeDecision
from tandem.distributed.position import Position
from tandem.platforms.placement import Placement
from tandem.signals import StopFlag
from tandem.work.root_cause import Cause

PROGRESS = NOTHING, SAVED, TRAINED = "nothing", "saved", "trained"
"""What there is of a run when a generation starts.

Nothing, the checkpoint that it resumes from, or newer state in node 0's memory, which a stop must not lose.
"""


@dataclass(frozen=True)
class GenerationEnd:
    """The end of a generation on this node, and what may explain it.

    `codes` are the ranks' exit codes by local rank, None for a rank that runs; `now` returns those of this
    moment. `blamed` waits a little for the rank that made the others fail, and returns all failures.
    `is_forwarded`: the agent has forwarded a stop. `last_words` is what the first failed rank has reported.
    `store` is the agents' store.
    """

    codes: Mapping[int, int | None]
    now: Callable[[], Mapping[int, int | None]]
    blamed: Callable[[], dict[int, int]]
    positions: Mapping[int, Position]
    nodes: int
    stop: StopFlag
    is_forwarded: bool
    last_words: str
    store: Any


class Workload(Protocol):
    """What a node's ranks run.

    `rank_entry` and `warm_up` are "module:name"; both receive `job`. The fork server imports `preload` before
    it forks the first rank. `words` names the workload on the command line of a simulated node.
    `standby_key` maps a rank's position to the key of its standby processes (see `Workers`).
    """

    rank_entry: str
    warm_up: str
    job: Any
    preload: Sequence[str]
    words: Sequence[str]
    standby_key: Callable[[Any], object]

    saves: bool
    """Whether tandem saves the ranks' state, in the node's memory and as checkpoints.

    If not, only the ranks know what is saved, and to start them once more saves nothing.
    """
    has_own_store: bool
    """Whether the ranks of each generation connect through a new store of their own (`env://`)."""
    logs_errors: bool
    """Whether rank 0 logs an error that ends it, so that its agent need not."""
    charges_all: bool
    """Whether every restart counts on every node."""

    def check(self, placement: Placement, gpus: Callable[[], Sequence[str]]) -> None:
        """Reject what cannot run here, before anything starts. `gpus` lists this machine's.

        Raises ConfigError.
        """

    def prepare(self, placement: Placement) -> ResumeDecision | None:
        """Check what can be wrong before any rank starts; on node 0, also decide where the run resumes.

        Returns None if the ranks decide by themselves. Raises TandemError.
        """

    def progress(self, has_trained: bool, resume: ResumeDecision) -> str:
        """Return what there is of the run (one of PROGRESS); `has_trained`: a rank has reported its plan."""

    def is_done(self) -> bool:
        """Return whether a job result of 0 is plausible, as node 0 sees the run."""

    def is_retried(self, code: int) -> bool:
        """Return whether ranks are restarted after this exit code."""

    def explain(self, end: GenerationEnd) -> tuple[int, Cause | None]:
        """Return the node's exit code after a rank failed or all ended, and the cause if there is one."""

    def last_line(self, code: int, restarts: int) -> str:
        """Return what node 0 prints last about a run that ended with `code`; "" if the ranks have said it."""


def rank_identity(position: Any) -> tuple[int, ...] | None:
    """Return what a script may read about its rank when it is imported: a standby key for scripts."""
    return position and (position.rank, position.local_rank, position.world_size, position.nodes)


def gpu_index(position: Any) -> int | None:
    """Return the number of a rank's GPU: a standby key for processes with an open CUDA context."""
    return position and int(position.local_rank)


def any_rank(_position: Any) -> None:
    """Return the same key for every rank: a standby process may then become any rank."""
