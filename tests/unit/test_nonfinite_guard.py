"""Steps that are not finite: kept out of the state on both paths, counted, named."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.consensus import Consensus, is_skipped
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.strategy.single import SingleStrategy as Single
from tandem.errors import NonFiniteError
from tandem.telemetry.metrics import Sample
from tandem.training.nonfinite import MOST_SKIPS_IN_A_ROW, Guard, Policy, culprit

CPU = torch.device("cpu")
FINE, BAD_LOSS = torch.zeros(4), torch.tensor([0.0, 0.0, 0.5, 0.0])  # what is exchanged
NAN = float("nan")


class Counted(nn.Module):
    """A layer with a buffer that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.seen += out.detach().sum(0)
        return out


def single() -> Single:
    return Single(ProcessGroup(Position(), CPU), ExchangeConfig(), ComputeConfig())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inner = [value for entry in optimizer.state.values() for value in entry.values()]
    return [v.clone() for v in (*model.state_dict().values(), *inner) if isinstance(v, Tensor)]


def take(
    guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, carried: Tensor
) -> bool:
    """One step as the train_step takes it; whether it was left out."""
    guard.begin_step()
    model(x).sum().backward()
    found = is_skipped(torch.cat([carried, guard.look().reshape(1)]))
    guard.update(found, lambda: None)
    optimizer.zero_grad()
    return bool(found)


OPTIMIZERS = {
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.1, fused=fused),
}


@pytest.mark.parametrize("first", [False, True], ids=["later", "first step"])
@pytest.mark.parametrize("waits", [True, False], ids=["host decides", "optimizer is told"])
@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16's scaler"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_nothing(name: str, scaled: bool, waits: bool, first: bool) -> None:
    model = Counted()
    optimizer = OPTIMIZERS[name](model.parameters(), not waits)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    guard = Guard("skip", single(), model, optimizer, scaler, CPU)
    guard._reads_at_once = waits  # False: what happens on GPUs, here with torch's fused CPU kernels
    good, bad = torch.ones(4, 3), torch.full((4, 3), NAN)
    if scaled:
        scaler.scale(torch.ones(()))
    if not first:
        assert not take(guard, model, optimizer, good, FINE)
    before = state_of(model, optimizer)
    assert take(guard, model, optimizer, bad, FINE), "the gradients alone tell"
    assert take(guard, model, optimizer, good, BAD_LOSS), "another rank's loss alone tells"
    after = state_of(model, optimizer)[: len(before)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not take(guard, model, optimizer, good, FINE)
    assert all(value.isfinite().all() for value in state_of(model, optimizer))
    assert not torch.equal(before[0], state_of(model, optimizer)[0])


def test_gradients_are_looked_at_without_a_change() -> None:
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    guard = Guard("stop", single(), model, torch.optim.SGD(model.parameters()), scaler, CPU)
    model.weight.grad = torch.tensor([[1e-40, -0.0, 3e38], [1.0, 2.0, 3.0]])
    before = model.weight.grad.clone()
    assert not guard.look() and torch.equal(before.view(torch.int32), model.weight.grad.view(torch.int32))
    for bad in (NAN, float("inf"), -float("inf")):
        model.weight.grad[1, 2] = bad
        assert guard.look()


class Told:
    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self.reasons: list[str] = []
        self.shown = 0

    def event(self, kind: str, **fields: object) -> None:
        self.events.append({"kind": kind, **fields})

    def samples(self, *samples: Sample) -> None:
        self.reasons += [sample.labels["reason"] for sample in samples]

    def not_finite(self) -> None:
        self.shown += 1


def agreed(step: int, loss: float = 1.0, is_skipped: bool = True) -> Consensus:
    return Consensus(step=step, loss=loss, stop=False, is_skipped=is_skipped, decisions=0)


def test_skip_counts_and_gives_up_after_many_in_a_row() -> None:
    told = Told()
    policy = Policy("skip", lambda: False, told)
    policy.consider(agreed(3, is_skipped=False))
    for step in range(MOST_SKIPS_IN_A_ROW - 1):
        policy.consider(agreed(step, NAN if step % 2 else 1.0))
    policy.consider(agreed(500))  # not in a row
    for step in range(501, 500 + MOST_SKIPS_IN_A_ROW - 1):
        policy.consider(agreed(step))
    with pytest.raises(NonFiniteError, match="like the 99 before it"):
        policy.consider(agreed(500 + MOST_SKIPS_IN_A_ROW - 1))
    assert told.reasons[:2] == ["nonfinite_grad", "nonfinite_loss"] and told.shown == 0


def test_stop_ends_the_run_and_names_the_tensor() -> None:
    told = Told()
    with pytest.raises(NonFiniteError, match=r"the loss of step 8 is not finite \(first: x7\); lower"):
        Policy("stop", lambda: False, told, lambda step: f"x{step}").consider(agreed(7, NAN))
    assert told.events == [{"kind": "nonfinite", "step": 8, "reason": "nonfinite_loss", "policy": "stop"}]
    assert told.shown == 1


def test_an_overflow_of_fp16_is_no_reason_to_end() -> None:
    told = Told()
    policy = Policy("stop", lambda: True, told)
    policy.consider(agreed(7))
    assert told.reasons == ["amp_overflow"] and not told.events
    with pytest.raises(NonFiniteError):
        policy.consider(agreed(8, NAN))


@dataclass
class Sentences:
    words: Tensor


class Alone:
    def gather_json(self, value: object) -> list[object]:
        return [value]


def test_the_first_tensor_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))

    def named(x: Tensor, wrap: Any = lambda x: x) -> str:
        return culprit(
            cast(ProcessGroup, Alone()),
            single(),
            model,
            [wrap(torch.ones(1, 2)), wrap(x)],
            lambda _: model(x).sum(),
        )

    assert named(torch.tensor([[1.0, NAN]])) == "the batch (micro-batch 1) on rank 0"
    assert named(torch.tensor([[1.0, NAN]]), lambda x: {"a": [1, x]}).startswith("the batch['a'][1]")
    assert named(torch.tensor([[1.0, NAN]]), Sentences).startswith("the batch['words'] (micro")
    with torch.no_grad():
        model[0].weight.fill_(3e38)
        model[2].weight.fill_(1.0)
    assert named(torch.full((1, 2), 9.0)) == "the output of 0 (Linear) on rank 0"
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[2].weight[0, 1] = NAN
    assert named(torch.ones(1, 2)) == "the weight 2.weight on rank 0"
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, NAN)
    model[2].bias.grad = torch.zeros(1)
    assert named(torch.ones(1, 2)) == "the gradient of 2.weight"
