"""When a node whose results are wrong is left out, and when the job ends instead."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.distributed.position import Grant, Position
from tandem.errors import ReplayMismatchError
from tandem.rank.restarts import WrongNodeHandler

STORE = ("127.0.0.1", 1, "generation/1")


@pytest.mark.parametrize(
    "spares, fewest, store, nodes, clean, why_not",
    [
        (0, None, STORE, (1,), 10, "--spares"),
        (1, None, None, (1,), 10, "`tandem launch`"),
        (1, None, STORE, (0,), 10, "node 0"),
        (1, None, STORE, (1, 2), 10, "exactly one"),
        (1, None, STORE, (), 10, "exactly one"),
        (1, None, STORE, (1,), None, "no check"),
        (0, 3, STORE, (1,), 10, "the 3 that --elastic requires"),
        (0, 2, STORE, (0,), 10, "node 0"),
        (0, 2, STORE, (1,), None, "no check"),
    ],
    ids=[
        "neither spares nor elastic", "no agent", "node 0", "two nodes", "not certain", "no clean check",
        "fewer than MIN", "node 0 of an elastic job", "no clean check in an elastic job",
    ],
)  # fmt: skip
def test_the_job_ends_where_the_node_cannot_be_left_out(
    spares: int, fewest: int | None, store: object, nodes: tuple[int, ...], clean: int | None, why_not: str
) -> None:
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(launch=SimpleNamespace(spares=spares)),
        grant=Grant(fewest_nodes=fewest),
        position=Position(nodes=3),
        world=SimpleNamespace(broadcast_json=lambda value: value),
        connection=SimpleNamespace(store=store),
    )
    with pytest.raises(ReplayMismatchError, match=why_not) as caught, WrongNodeHandler(session).watching():
        raise ReplayMismatchError("step 16 does not count", nodes, clean)
    assert str(caught.value).startswith("step 16 does not count; ")
