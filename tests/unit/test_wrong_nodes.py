"""When a node whose results are wrong is left out, and when the job ends instead."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.errors import ReplayMismatchError
from tandem.rank.restarts import leaving_out

STORE = ("127.0.0.1", 1, "generation/1")


@pytest.mark.parametrize(
    "spares, store, nodes, clean",
    [
        (0, STORE, (1,), 10),
        (1, None, (1,), 10),
        (1, STORE, (0,), 10),
        (1, STORE, (1, 2), 10),
        (1, STORE, (), 10),
        (1, STORE, (1,), None),
    ],
    ids=["no spares", "no agent", "node 0", "two nodes", "not certain", "no clean check"],
)
def test_the_job_ends_where_the_node_cannot_be_left_out(
    spares: int, store: object, nodes: tuple[int, ...], clean: int | None
) -> None:
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(launch=SimpleNamespace(spares=spares)),
        connection=SimpleNamespace(store=store),
    )
    with pytest.raises(ReplayMismatchError), leaving_out(cast(Any, session)):
        raise ReplayMismatchError("step 16 does not count", nodes, clean)
