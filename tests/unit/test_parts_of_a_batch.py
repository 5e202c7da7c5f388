"""run.parts: a batch in parts, whatever it is made of."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from tandem.custom_loop.backward import Backward
from tandem.custom_loop.engine import MicroBatches
from tandem.errors import ConfigError


class Exchanges:
    """What is told of the exchange of gradients."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def set_gradient_sync(self, does: bool) -> None:
        self.said.append(does)


@dataclass
class Rows:
    x: Tensor
    name: str = "rows"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


X = torch.arange(7.0)
WHOLE: dict[str, Any] = {
    "a tensor": X, "a tuple": (X, X + 1), "a named one": Pair(X, X + 1), "a list": [X], "a dict": {"x": X},
    "a UserDict": UserDict(x=X), "a dataclass": Rows(X), "with a number": (X, torch.tensor(2.0)),
    "with a table": (X, torch.ones(3, 3)),
}  # fmt: skip


def first(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, dict | UserDict):
        return cast(Tensor, batch["x"])
    return batch.x if isinstance(batch, Rows) else batch[0]


@pytest.mark.parametrize("batch", WHOLE.values(), ids=WHOLE.keys())
def test_parts_are_the_batch(batch: Any) -> None:
    """Those of a dataclass and of a UserDict were the whole batch, again and again; a number was an error."""
    exchanges, weights, found = Exchanges(), [], []
    parts = MicroBatches(0, 0, cast(Backward, exchanges))
    for part in parts.of(batch, 3, step=0):
        assert type(part) is type(batch)
        found.append(first(part))
        weights.append(parts.weight)
    assert [len(part) for part in found] == [3, 2, 2] and torch.equal(torch.cat(found), X)
    assert weights == pytest.approx([3 / 7, 2 / 7, 2 / 7]) and parts.weight == 1.0
    assert exchanges.said == [False, False, True, True]


@pytest.mark.parametrize("count", [0, 8, -1])
def test_as_many_parts_as_there_are_samples(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"invalid value {count}; expected 1 to 7"):
        list(MicroBatches(0, 0, cast(Backward, Exchanges())).of(X, count, step=0))
