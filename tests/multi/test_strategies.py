"""What every strategy must do, asked of all of them, with as many real gloo processes as each can have.

Each case runs the same small model on the same data. `train` is what a run does: spread, load, wrap, step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from forked_ranks import in_ranks
from needs import require_strategy
from tandem.config import Settings
from tandem.data.datasets import TensorRows
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs
from tandem.training.evaluate import Evaluation
from tandem.training.step import Proposal, TrainStep

pytestmark = pytest.mark.multi

BATCH, STEPS, HALF = 12, 8, 5
CASES = [("single", 1), ("dp", 1), ("ddp", 1), ("ddp", 2), ("ddp", 3), ("ddp_one_rank", 1), ("fsdp", 2)]
NAN_STEP = 3


class Blocks(nn.Module):
    """A model with a list of blocks, as transformers have; `batchnorm` gives it running statistics."""

    def __init__(self, batchnorm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17)
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(2))
        self.norm = nn.BatchNorm1d(17) if batchnorm else nn.LayerNorm(17)
        self.last = nn.Linear(17, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        out: Tensor = self.last(self.norm(x))
        return out


class Classes:
    """The task; its sums count what every rank has got right."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, tuple[Any, Any]]]:
        x, y = batch
        out = model(x)
        right = (out.argmax(dim=1) == y).sum()
        sums = {"accuracy": (right, len(y)), "odd": (y.sum(), len(y) * 0.5)}
        return nn.functional.cross_entropy(out, y), sums


def rows(count: int = 400) -> TensorRows:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    return TensorRows(x, (x[:, 0] > 0).long())


class Stream(IterableDataset[Any]):
    """Rows of which nobody knows the number: ranks make different numbers of passes, or none."""

    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.rows.inputs, self.rows.targets, strict=True)


def micro_batches(
    step: int, rank: int, size: int, poison: bool, batch: int = BATCH
) -> list[tuple[Tensor, Tensor]]:
    """A rank's share of a batch in two micro-batches; under `poison` one rank's is not finite once."""
    data = rows()
    share = torch.arange(step * batch + rank, (step + 1) * batch, size) % 400
    parts = [(data.inputs[part], data.targets[part]) for part in share.chunk(2)]
    if poison and step == NAN_STEP and rank == size - 1:
        parts[0] = (torch.full_like(parts[0][0], torch.nan), parts[0][1])
    return parts


@dataclass
class Trained:
    """What one rank saw."""

    strategy: Any
    model: nn.Module
    evaluation: Evaluation
    losses: list[float] = field(default_factory=list)
    sums: list[Mapping[str, tuple[float, float]]] = field(default_factory=list)
    is_skipped: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    clips: list[int] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    """Whole states, after each step; they are there on rank 0."""


def train(
    group: ProcessGroup,
    name: str,
    first: int = 0,
    last: int = STEPS,
    begin: dict[str, Any] | None = None,
    batchnorm: bool = False,
    poison: bool = False,
    adam: bool = False,
    keep: bool = True,
    batch: int = BATCH,
    **settings: Any,
) -> Trained:
    made = Settings().replace(batch_size=batch, on_nonfinite="skip", **settings)
    strategy = strategies.load(name, group, made.exchange)
    torch.manual_seed(group.rank if begin is None else 99)  # rank 0's weights count, or the loaded ones
    if not begin and group.rank == 0:
        torch.manual_seed(1)
    model = strategy.shard(Blocks(batchnorm))
    trained = [p for p in model.parameters()]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(trained, lr=0.01) if adam else torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    )
    optimizer = strategy.shard_optimizer(optimizer)
    if begin is not None:
        strategy.load_model(model, begin["model"])
        strategy.load_optimizer(optimizer, begin["optimizer"])
    task: Any = TaskWithDefaults(Classes())  # type: ignore[arg-type]
    train_step = TrainStep(
        group, strategy, made.compute, made.optimization, batch, 0, task, model, optimizer, Clock()
    )
    train_step.drops_gradients = name == "ddp_one_rank"  # as on the GPU that it is for
    if begin is not None:
        train_step.scaler.load_state_dict(begin["scaler"])
        strategy.load_exchange(begin["exchange"])
    seen = Trained(strategy, model, Evaluation(group, strategy, task, model, rows(101), 8))
    train_step.take_dry_step(micro_batches(first, group.rank, group.size, False, batch), first, Costs())
    for step in range(first, last):
        stop = step == first + 1 and group.rank == group.size - 1
        proposal = Proposal(stop, 5 if step == first + 2 and group.is_first else 0)
        agreed = train_step.take(micro_batches(step, group.rank, group.size, poison, batch), step, proposal)
        assert agreed is not None and agreed.step == step
        seen.losses.append(agreed.loss)
        seen.sums.append(agreed.sums)
        seen.is_skipped += [step] if agreed.is_skipped else []
        seen.stops += [step] if agreed.stop else []
        seen.decisions.append(agreed.decisions)
        readings = train_step.read()
        seen.norms.append(readings.grad_norm)
        seen.clips.append(readings.clips)
        if keep:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            whole = strategy.gather_full({**state, "scaler": train_step.scaler.state_dict()})
            whole["exchange"] = strategy.exchange_state()
            seen.states.append(copied(whole) if group.is_first else {})
    return seen


def copied(value: Any) -> Any:
    """Nested state dicts as they are now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def contract(group: ProcessGroup, name: str, folder: Path) -> dict[str, Any]:
    """One rank's part of everything that is asked of a strategy."""
    calm = train(group, name)
    scores = calm.evaluation.scores()
    streams = [replace(calm.evaluation, dataset=Stream(count), batch_size=2).scores() for count in (9, 1)]
    path = folder / f"half-{name}-{group.size}.pt"  # every rank loads the whole state, as a run broadcasts it
    if group.is_first:
        torch.save(calm.states[HALF - 1], path)
    group.sum([0.0])
    resumed = train(group, name, first=HALF, begin=torch.load(path))
    clipped = train(group, name, clip_norm=0.05)
    poisoned = train(group, name, poison=True)
    scaled = train(group, name, poison=True, precision="fp16")
    adam = train(group, name, adam=True, batchnorm=True)
    if group.is_first:
        torch.save(adam.states[HALF - 1], path)
    group.sum([0.0])
    adam_resumed = train(group, name, first=HALF, begin=torch.load(path), adam=True, batchnorm=True)
    return {
        "losses": calm.losses,
        "sums": calm.sums,
        "stops": calm.stops,
        "decisions": calm.decisions,
        "norms": calm.norms,
        "states": calm.states,
        "scores": scores,
        "streams": streams,
        "resumed": resumed.states,
        "clipped": (clipped.norms, clipped.losses),
        "poisoned": (poisoned.is_skipped, poisoned.states),
        "scaled": (scaled.is_skipped, scaled.states),
        "adam": (adam.states, adam_resumed.states, adam.losses),
        "numel": sum(calm.strategy.local(p).numel() for p in calm.model.parameters()),
        "shards_parameters": calm.strategy.shards_parameters,
        "whole": sum(p.numel() for p in calm.model.parameters()),
    }


def hundred(group: ProcessGroup, name: str, folder: Path) -> list[float]:
    """Micro-batches of 10 samples: over 2, as elsewhere here, BatchNorm gives little more than signs, and a
    change of 1e-7 in ddp's own first weights moves its loss by 0.7 within 100 steps."""
    return train(group, name, last=100, batchnorm=True, keep=False, batch=60).losses


def in_processes(name: str, size: int, port: int, what: Any, folder: Path) -> list[Any]:
    """What each rank's `what(group, name, folder)` gave."""
    require_strategy(name)
    strategies.preload(name)
    return in_ranks(lambda group: what(group, name, folder), size, port, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[dict[str, Any]]]:
    return {}


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest,
    found: dict[tuple[str, int], list[dict[str, Any]]],
    tmp_path: Path,
    free_port: int,
) -> Iterator[list[dict[str, Any]]]:
    """Every rank's answers for a case; asked once."""
    for case in (("single", 1), request.param):  # the reference first
        if case not in found:
            found[case] = in_processes(*case, free_port, contract, tmp_path)
    yield found[request.param]


@pytest.fixture
def reference(ranks: Any, found: dict[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    """One process that exchanges nothing."""
    return found["single", 1][0]


over_all = pytest.mark.parametrize(
    "ranks",
    [pytest.param(case, marks=pytest.mark.soak if case[1] == 3 else ()) for case in CASES],
    ids=lambda case: f"{case[0]}-{case[1]}",
    indirect=True,
)


@pytest.mark.core
@over_all
def test_losses_sums_and_norms_are_those_of_one_process(ranks: Any, reference: Any) -> None:
    for rank in ranks:
        assert rank["losses"] == pytest.approx(reference["losses"], abs=1e-5)
        assert rank["losses"] == ranks[0]["losses"] and rank["norms"] == ranks[0]["norms"]
        assert rank["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        for mine, theirs in zip(rank["sums"], reference["sums"], strict=True):
            assert mine.keys() == theirs.keys() == {"accuracy", "odd"}
            for name in mine:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6)
        assert rank["sums"][0]["accuracy"][1] == pytest.approx(BATCH)


@over_all
def test_a_stop_of_one_rank_and_decisions_of_rank_0_reach_all(ranks: Any) -> None:
    for rank in ranks:
        assert rank["stops"] == [1]
        assert rank["decisions"] == [0, 0, 5, *[0] * (STEPS - 3)]


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Nested state dicts, bit for bit."""
    if isinstance(one, Tensor):
        assert type(one) is type(other) and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{where}.{index}")
    else:
        assert one == other, where


@over_all
def test_a_run_that_goes_on_from_a_whole_state_has_the_same_bits(ranks: Any) -> None:
    assert_equal(ranks[0]["resumed"], ranks[0]["states"][HALF:])
    calm, resumed, _ = ranks[0]["adam"]
    assert_equal(resumed, calm[HALF:])


@over_all
def test_whole_states_are_alike_whatever_the_strategy(ranks: Any, reference: Any) -> None:
    """Names, shapes, types and groups are equal; numbers within rounding."""

    def compare(mine: Any, theirs: Any) -> None:
        if isinstance(theirs, Tensor):
            assert type(mine) is Tensor and mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        elif isinstance(theirs, dict):
            assert list(mine) == list(theirs)
            for key in theirs:
                compare(mine[key], theirs[key])
        elif isinstance(theirs, list):
            for one, other in zip(mine, theirs, strict=True):
                compare(one, other)
        else:
            assert mine == theirs

    compare(ranks[0]["states"][-1], reference["states"][-1])


@over_all
def test_clipping_uses_the_norm_over_all_gradients(ranks: Any, reference: Any) -> None:
    for mine, theirs in zip(ranks[0]["clipped"], reference["clipped"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert ranks[0]["clipped"][1] != ranks[0]["losses"]


@over_all
@pytest.mark.parametrize("kind", ["poisoned", "scaled"])
def test_a_batch_that_is_not_finite_on_one_rank_changes_nothing_on_any(ranks: Any, kind: str) -> None:
    for rank in ranks:
        assert rank[kind][0] == [NAN_STEP]
    states = ranks[0][kind][1]
    for part in ("model", "optimizer"):
        assert_equal(states[NAN_STEP][part], states[NAN_STEP - 1][part])
    assert not torch.equal(states[NAN_STEP]["model"]["last.weight"], states[-1]["model"]["last.weight"])


@over_all
def test_scores_do_not_depend_on_the_strategy(ranks: Any, reference: Any) -> None:
    for rank in ranks:
        assert rank["scores"] == pytest.approx(reference["scores"], abs=1e-5)
        assert rank["scores"] == ranks[0]["scores"]
        assert rank["streams"] == ranks[0]["streams"]
        for mine, theirs in zip(rank["streams"], reference["streams"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


@over_all
def test_parameters_are_shared_out_where_the_strategy_says_so(ranks: Any, request: Any) -> None:
    _, size = request.node.callspec.params["ranks"]
    whole, shares = ranks[0]["whole"], [rank["numel"] for rank in ranks]
    if ranks[0]["shards_parameters"]:
        assert sum(shares) == whole and max(shares) < 1.25 * whole / size
    else:
        assert shares == [whole] * size


@pytest.mark.parametrize("name", ["single", "dp"])
def test_more_ranks_than_one_is_an_error_that_says_what_to_do(name: str) -> None:
    group = ProcessGroup(Position(world_size=2), torch.device("cpu"))
    with pytest.raises(ConfigError, match="--strategy ddp"):
        strategies.load(name, group)


@pytest.mark.soak
def test_fsdp_has_the_losses_of_ddp_over_100_steps(tmp_path: Path, free_port: int) -> None:
    fsdp, ddp = (in_processes(name, 3, free_port, hundred, tmp_path)[0] for name in ("fsdp", "ddp"))
    assert len(ddp) == 100 and sum(ddp[90:]) < sum(ddp[:10])
    assert fsdp == pytest.approx(ddp, abs=1e-5)
