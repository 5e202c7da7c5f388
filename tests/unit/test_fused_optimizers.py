"""On GPUs the optimizer is a fused one, but not where torch's kernel takes no such gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from tandem.config import Settings
from tandem.tasks.base import TaskWithDefaults
from tandem.training.optim import build_optimizer

BARE = {name: lambda *_: None for name in ("build_model", "build_datasets", "loss")}


class Parts(nn.Module):
    def __init__(self, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=sparse)
        self.first, self.late = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))

    def forward(self, with_late: bool) -> torch.Tensor:
        out = (self.words(torch.tensor([1])) * self.first).sum()
        return (out * self.late.sum() if with_late else out).abs()


KINDS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {  # model, all gradients, methods
    "plain": ({}, True, {}),
    "freeze": ({}, True, {"freeze": lambda self, model, epoch: None}),
    "find-unused": ({}, False, {}),
    "sparse": ({"sparse": True}, True, {}),
    "complex": ({"dtype": torch.complex64}, True, {}),
}
REFUSED = {"sgd": {"freeze", "find-unused", "sparse", "complex"}, "adam": {"complex"}, "adamw": {"complex"}}


@pytest.mark.parametrize(("kind", "case"), [
    (kind, case) for kind in KINDS for case in CASES if kind == "sgd" or case != "sparse"  # torch has none
])  # fmt: skip
def test_a_step_that_the_fused_kernel_does_not_take_is_taken_by_another(
    kind: str, case: str, gpu: Any
) -> None:
    form, all_gradients, methods = CASES[case]
    plain = {"momentum": 0.0, "weight_decay": 0.0} if case == "sparse" else {}  # torch has neither for them
    config = Settings().replace(optimizer=kind, lr=0.1, **plain).optimization
    task = TaskWithDefaults(type("Bare", (), BARE | methods)())
    weights = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        net = Parts(**form)
        if is_ours:
            optimizer = build_optimizer(config, task, net, all_gradients)
            assert bool(optimizer.param_groups[0]["fused"]) == (case not in REFUSED[kind])
        else:
            names = ("lr", "momentum", "weight_decay", "nesterov")
            same = {name: value for name, value in optimizer.defaults.items() if name in names}
            optimizer = KINDS[kind](net.parameters(), **same)
        for with_late in (case == "plain", True, True):
            optimizer.zero_grad(set_to_none=True)
            net(with_late).backward()
            optimizer.step()
        weights.append([p.detach() for p in net.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs)
