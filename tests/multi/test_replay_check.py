"""Another rank repeats a micro-batch before its step counts: flipped bits are named, and clean steps pass.

Three real gloo processes train a model with dropout, BatchNorm and AdamW; one of them flips one bit.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from forked_ranks import in_ranks
from tandem.config import Settings
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.errors import ConfigError, ReplayMismatchError
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs
from tandem.training.rank_checks import checksum
from tandem.training.step import Proposal, TrainStep

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]

FLIPS = int(os.environ.get("TEST_FLIPS", "24"))
CLEAN_STEPS = int(os.environ.get("TEST_CLEAN_STEPS", "100"))
KINDS = ("gradient", "activation", "optimizer state", "parameter")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, 5)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # beside BatchNorm's

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(x)
        return out * (1 + 1e-3 * self.calls)  # reads what an earlier pass has changed


class Classes:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Rank:
    """One rank's model, and events of its recorder."""

    def __init__(self, group: ProcessGroup, micro_batches: int = 2) -> None:
        settings = Settings().replace(batch_size=60)
        self.group = group
        self.count = micro_batches
        self.events: list[dict[str, Any]] = []
        recorder = cast(
            Any,
            SimpleNamespace(
                event=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
                samples=lambda *_: None,
            ),
        )
        strategy = strategies.load("ddp", group, settings.exchange)
        torch.manual_seed(1)
        self.model = strategy.shard(Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        task: Any = TaskWithDefaults(cast(Any, Classes()))
        self.train_step = TrainStep(
            group, strategy, settings.compute, settings.optimization, 60, 7, task,
            self.model, self.optimizer, Clock(),
        )  # fmt: skip
        self.check = self.train_step.repeat_on_others(settings.compute, recorder)
        self.step = 0
        self.train_step.take_dry_step(self.batches(), 0, Costs())

    def batches(self) -> list[Any]:
        draws = torch.Generator().manual_seed(1000 * self.step + self.group.rank)
        return [
            {
                "x": torch.randn(5, 6, generator=draws),
                "y": torch.randint(5, (5,), generator=draws),
                "name": "a",
            }
            for _ in range(self.count)
        ]

    def take(self, checked: bool = True) -> str:
        """Take a step; return the error's text, or nothing."""
        if checked:
            self.check.check_next_step()
        try:
            self.train_step.take(self.batches(), self.step, Proposal())
        except ReplayMismatchError as error:
            return str(error)
        self.step += 1
        return ""

    def digest(self) -> list[int]:
        """One number per rank: its parameters and optimizer state."""
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        tensors = [*self.model.parameters(), *state]
        return self.group.gather(int(checksum(torch.stack([checksum(tensor) for tensor in tensors]))))


def flip(tensor: Tensor, draws: random.Random) -> None:
    """Flip one bit of a nonzero number of a tensor, in place; not so small a bit that rounding hides it."""
    words = tensor.detach().view(-1).view(torch.int32)
    there = [int(index) for index in words.nonzero()] or [0]
    words[draws.choice(there)] ^= 1 << draws.randrange(16, 23)


@contextmanager
def flipped(rank: Rank, kind: str, draws: random.Random) -> Iterator[None]:
    """Flip a bit on this rank for the block, once or in each computation; then the state is right again."""
    seed = draws.random()
    left = [1 if draws.random() < 0.5 else 1000]

    def once(tensor: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] >= 0:
            tensor = tensor.clone()
            flip(tensor, random.Random(seed))
        return tensor

    handle: Any = None
    if kind == "gradient":
        handle = draws.choice([*rank.model.parameters()]).register_hook(once)
    elif kind == "activation":
        layer = cast(nn.Module, cast(Any, rank.model).layers[4])

        def change(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + (once(output.detach()) - output.detach())

        handle = layer.register_forward_hook(change)
    else:
        tensor: Tensor = draws.choice([*rank.model.parameters()])
        if kind == "optimizer state":
            tensor = rank.optimizer.state[tensor]["exp_avg_sq"]
        flip(tensor, random.Random(seed))
    yield
    if handle is not None:
        handle.remove()
    else:
        flip(tensor, random.Random(seed))


def finds_flips(group: ProcessGroup) -> dict[str, Any]:
    rank = Rank(group)
    assert not rank.take()
    wrong = []
    for number in range(FLIPS):
        draws = random.Random(number)  # the same on all ranks
        kind, bad = KINDS[number % len(KINDS)], draws.randrange(group.size)
        before = rank.digest()
        with flipped(rank, kind, draws) if group.rank == bad else nothing(draws):
            said = rank.take()
        named = rank.events.pop()["ranks"] if said else []
        certain = [each["rank"] for each in named] == [bad]
        if not certain or f"rank {bad} on node {bad}" not in said or rank.digest() != before:
            wrong.append((number, kind, bad, said))
        assert not rank.take(checked=number % 2 == 0), "the next step is clean"
    return {"wrong": wrong, "steps": rank.step}


@contextmanager
def nothing(draws: random.Random) -> Iterator[None]:
    yield


def passes_clean_steps(group: ProcessGroup) -> dict[str, Any]:
    found = [Rank(group, micro_batches) for micro_batches in (1, 2)]
    wrong = [said for rank in found for _ in range(CLEAN_STEPS) if (said := rank.take())]
    # The checks change nothing: the same steps without them have the same bits.
    calm = Rank(group)
    for _ in range(CLEAN_STEPS):
        calm.take(checked=False)
    return {"wrong": wrong, "equal": calm.digest() == found[1].digest()}


def is_unseen_by_replicas(group: ProcessGroup) -> dict[str, Any]:
    """The control: a wrong gradient is in the mean of all ranks, whose weights stay equal."""
    rank = Rank(group)
    for number in range(10):
        draws = random.Random(number)
        with flipped(rank, "gradient", draws) if group.rank == 1 else nothing(draws):
            assert not rank.take(checked=False)
    return {"digests": len(set(rank.digest()))}


def refuses(group: ProcessGroup) -> dict[str, Any]:
    said = []
    rank = Rank(group)
    settings = Settings().replace(compile="default")
    with pytest.raises(ConfigError) as caught:
        rank.train_step.repeat_on_others(settings.compute, cast(Any, None))
    said.append(str(caught.value))
    torch.set_num_threads(1 + group.rank)
    with pytest.raises(ConfigError) as caught:
        rank.train_step.repeat_on_others(Settings().compute, cast(Any, None))
    torch.set_num_threads(1)  # OpenMP's threads of the process that forked this one are gone
    said.append(str(caught.value))
    rank.batches = lambda: [{"x": torch.zeros(5, 6), "y": torch.zeros(5).long(), "rank": group.rank}]  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        rank.take()
    said.append(str(caught.value))
    return {"said": said}


def of_two(group: ProcessGroup) -> dict[str, Any]:
    """Two ranks: a fault that passes is named; for one that stays, both are."""
    rank = Rank(group)
    said = []
    for left in (1, 1000):
        count = [left]

        def change(gradient: Tensor, count: list[int] = count) -> Tensor:
            count[0] -= 1
            return gradient + 1 if count[0] >= 0 else gradient

        handle = next(rank.model.parameters()).register_hook(change) if group.rank == 1 else None
        said.append((rank.take(), [each["rank"] for each in rank.events.pop()["ranks"]]))
        if handle is not None:
            handle.remove()
    return {"said": said}


def on_nodes(rank: int, size: int) -> Position:
    return Position(rank=rank, world_size=size, node_rank=rank, nodes=size, node_name=f"host{rank}")


@pytest.fixture
def in_nodes(free_port: int, tmp_path: Path) -> Callable[..., list[Any]]:
    def run(what: Any, size: int = 3) -> list[Any]:
        strategies.preload("ddp")
        return in_ranks(what, size, free_port, tmp_path, on_nodes)

    return run


def test_each_flipped_bit_is_named_and_its_step_does_not_count(in_nodes: Any) -> None:
    for rank in in_nodes(finds_flips):
        assert not rank["wrong"] and rank["steps"] == FLIPS + 1


def test_clean_steps_pass_and_keep_their_bits(in_nodes: Any) -> None:
    assert all(rank == {"wrong": [], "equal": True} for rank in in_nodes(passes_clean_steps))


def test_replicas_do_not_show_a_wrong_gradient(in_nodes: Any) -> None:
    assert all(rank == {"digests": 1} for rank in in_nodes(is_unseen_by_replicas))


def test_what_cannot_be_repeated_is_refused(in_nodes: Any) -> None:
    for rank in in_nodes(refuses):
        compiled, threads, batches = rank["said"]
        assert "--compile" in compiled and "2 threads" in threads and "more than tensors" in batches
        assert all("--replay-check never" in line and "\n" not in line for line in rank["said"])


def test_of_two_ranks_a_fault_that_stays_names_both(in_nodes: Any) -> None:
    for rank in in_nodes(of_two, 2):
        (passing, named), (staying, both) = rank["said"]
        assert named == [1] and "rank 1 on node 1 (host1)" in passing and "layers.0.weight" in passing
        assert sorted(both) == [0, 1] and " or rank " in staying
