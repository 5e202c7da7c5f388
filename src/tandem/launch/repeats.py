"""Show on node 0's terminal the logs of ranks that ended twice in the same way at the same step.

A failure that recurs at one step has a cause. A rank that is killed or aborts writes its last output to its
own log, on its own node, and the other nodes only notice that it is gone. Restarts would hide the cause until
their budget is spent.
"""

import contextlib
import json
import logging
import time
from collections.abc import Mapping

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.distributed.position import Position
from tandem.errors import FINISHED, PEER_LOST, STOPPED
from tandem.launch.node_context import NodeContext
from tandem.script.environment import error_file
from tandem.timeouts import MONITOR_SECONDS, OTHERS_SECONDS
from tandem.work.root_cause import Cause, last_words

log = logging.getLogger("tandem.agent")

Words = tuple[Cause, str]
"""How a rank ended, and where it was then."""


class Repeats:
    """Compare the end of each generation that is followed by another with the end before it."""

    def __init__(self, node: NodeContext, store: TCPStore) -> None:
        self._node = node
        self._store = store
        self._last: tuple[int, int] | None = None

    def ended(self, code: int, positions: Mapping[int, Position], codes: Mapping[int, int]) -> None:
        """Record that a generation ended with `code` on this node; `codes` has its ranks' by local rank."""
        first = positions[0]
        prefix = f"{first.store[2] if first.store else ''}/words/"
        own_causes = [
            (self._cause(positions[rank], code), self._node.view.describe_position(positions[rank].rank))
            for rank, code in codes.items()
            if rank in positions and code not in (FINISHED, STOPPED)
        ]
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are its readers
            serialized = [[cause.to_json(), where] for cause, where in own_causes]
            self._store.set(f"{prefix}{first.node_rank}", json.dumps(serialized))
        this = code, self._node.view.rank_zeros_step()
        is_same = this == self._last
        self._last = this
        if is_same and first.node_rank == 0:
            self._show(own_causes + self._of_others(prefix, first.nodes))

    def _cause(self, position: Position, code: int) -> Cause:
        path = self._node.run.rank_log(position.rank)
        lines = tuple(line for line in last_words(error_file(position), path) if "frame #" not in line)
        return Cause(position.rank, position.node_rank, position.node_name, code, lines)

    def _of_others(self, prefix: str, nodes: int) -> list[Words]:
        """Return what the other nodes have written within OTHERS_SECONDS."""
        found = list[Words]()
        missing = set(range(1, nodes))
        deadline = time.monotonic() + OTHERS_SECONDS
        with contextlib.suppress(RuntimeError):
            while missing and time.monotonic() < deadline:
                for node in [each for each in missing if self._store.check([f"{prefix}{each}"])]:
                    missing.discard(node)
                    with contextlib.suppress(
                        ValueError, TypeError, AttributeError
                    ):  # any client of the store can write there
                        parsed = json.loads(self._store.get(f"{prefix}{node}"))
                        found += [(Cause.from_json(cause), str(where)[:100]) for cause, where in parsed]
                time.sleep(MONITOR_SECONDS * bool(missing))
        return found

    def _show(self, words: list[Words]) -> None:
        """Log the ends of the ranks that did more than lose their peers, or of all if there are none."""
        own = [each for each in words if each[0].code != PEER_LOST] or words
        for cause, where in own:
            lines = "\n  ".join(["", *cause.lines])
            log.warning("the same failure a second time: %s %s; end of its log:%s", cause, where, lines)
