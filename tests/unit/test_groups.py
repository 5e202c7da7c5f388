"""Parameter groups that are not those of the checkpoint are one line, before anything is loaded."""

from typing import Any

import pytest
import torch
from torch import nn

from tandem.errors import ConfigError
from tandem.training.optim import check_groups, groups_of


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, width)


def made(order: str, kind: Any = torch.optim.AdamW, net: nn.Module | None = None) -> Any:
    net = net or Net()
    optimizer = kind([{"params": list(getattr(net, name).parameters())} for name in order], lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, groups_of(optimizer, net.named_parameters())


def test_the_same_groups_fit_with_names_and_without() -> None:
    (before, theirs), (now, ours) = made("ab"), made("ab")
    for names in (theirs, None):
        check_groups("optimizer", before.state_dict(), names, now, ours)


@pytest.mark.parametrize("order", ["a", "b", "ba"])
def test_other_groups_are_one_line(order: str) -> None:
    before, theirs = made("ab")
    now, ours = made(order)
    with pytest.raises(ConfigError) as caught:
        check_groups("optimizer", before.state_dict(), theirs, now, ours)
    assert "optimizer" in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_the_order_inside_a_group_the_class_and_shapes_count() -> None:
    before, theirs = made("ab")
    net = Net()
    turned = torch.optim.AdamW([{"params": [net.a.bias, net.a.weight]}, {"params": [*net.b.parameters()]}])
    with pytest.raises(ConfigError, match="a.weight"):
        check_groups("o", before.state_dict(), theirs, turned, groups_of(turned, net.named_parameters()))
    other, ours = made("ab", torch.optim.Adam)
    with pytest.raises(ConfigError, match="AdamW"):
        check_groups("o", before.state_dict(), theirs, other, ours)
    wide, ours = made("ab", net=Net(7))
    with pytest.raises(ConfigError, match=r"exp_avg of parameter 2"):
        check_groups("o", before.state_dict(), None, wide, ours)
    fewer, ours = made("a")
    with pytest.raises(ConfigError, match="2 parameter groups"):
        check_groups("o", before.state_dict(), None, fewer, ours)


@pytest.mark.parametrize(
    "saved", [None, 7, {}, {"param_groups": 3, "state": {}}, {"param_groups": [{}], "state": {}}]
)
def test_what_is_no_optimizers_state_is_one_line(saved: Any) -> None:
    now, ours = made("ab")
    with pytest.raises(ConfigError, match="optimizer"):
        check_groups("optimizer", saved, None, now, ours)
