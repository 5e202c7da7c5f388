"""Compressed gradients, as two gloo processes exchange them: what agrees, what is kept, what a step costs.

The telemetry parameter is in the buckets that are compressed: its numbers have to be those of plain ddp.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategies import (
    HALF,
    NAN_STEP,
    STEPS,
    assert_equal,
    in_processes,
    train,
)
from torch import nn

from needs import require_strategy
from tandem.config import Settings
from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.custom_loop.limits import check_settings
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.replica import PiggybackedValues, Replica
from tandem.distributed.strategy import check_together
from tandem.errors import ConfigError

pytestmark = pytest.mark.multi

KINDS = ("none", "bf16", "fp16", "powersgd")


def exchange(kind: str) -> dict[str, Any]:
    """One matrix of 17x17, one of 17x6 as factors, in more than one bucket."""
    return {"gradient_compression": "powersgd:2" if kind == "powersgd" else kind, "bucket_mb": 0.001}


def everything(group: ProcessGroup, name: str, folder: Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        calm = train(group, name, **exchange(kind))
        poisoned = train(group, name, poison=True, **exchange(kind))
        path = folder / f"{kind}-{group.size}.pt"
        if group.is_first:
            torch.save(calm.states[HALF - 1], path)
        group.sum([0.0])
        resumed = train(group, name, first=HALF, begin=torch.load(path), **exchange(kind))
        found[kind] = {
            "losses": calm.losses,
            "sums": calm.sums,
            "stops": calm.stops,
            "decisions": calm.decisions,
            "states": calm.states,
            "weights": calm.model.state_dict(),
            "resumed": resumed.states,
            "poisoned": (poisoned.is_skipped, poisoned.states),
            "bytes": calm.strategy.sync_bytes(list(calm.model.parameters())),
            "shapes": [tuple(p.shape) for p in calm.model.parameters()],
        }
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any, module_ports: list[int]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compressed")
    return in_processes("ddp", 2, module_ports[0], everything, folder)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_ranks_agree_on_arrives_uncompressed(ranks: list[dict[str, Any]], kind: str) -> None:
    plain = ranks[0]["none"]
    for rank in ranks:
        mine = rank[kind]
        assert mine["stops"] == plain["stops"] == [1] and mine["decisions"] == plain["decisions"]
        # Of equal weights: bit for bit with two ranks; a ring of three adds up by where a number stands.
        ulps = {"rel": 0, "abs": 0} if len(ranks) == 2 else {"rel": 1e-6}
        assert mine["losses"][0] == pytest.approx(plain["losses"][0], **ulps)
        assert mine["losses"] == ranks[0][kind]["losses"]
        counts = [[number for _, number in sums.values()] for sums in mine["sums"]]
        assert counts == [[number for _, number in sums.values()] for sums in plain["sums"]]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_replicas_stay_equal_and_near_those_of_plain_ddp(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        assert_equal(rank[kind]["weights"], ranks[0][kind]["weights"])
    assert ranks[0][kind]["losses"] == pytest.approx(ranks[0]["none"]["losses"], abs=0.05)
    assert ranks[0][kind]["losses"] != ranks[0]["none"]["losses"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_from_a_saved_state_has_the_same_bits(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    calm = ranks[0][kind]["states"]
    assert_equal(ranks[0][kind]["resumed"], calm[HALF:])
    remembered = calm[-1]["exchange"]
    assert bool(remembered) == (kind == "powersgd")
    for errors in remembered.get("errors", {}).values():
        assert len(errors) == len(ranks) and not torch.equal(errors[0], errors[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_left_out_leaves_the_memory_alone(ranks: list[dict[str, Any]], kind: str) -> None:
    is_skipped, states = ranks[0][kind]["poisoned"]
    assert is_skipped == [NAN_STEP]
    assert_equal(states[NAN_STEP], states[NAN_STEP - 1])
    assert all(bool(torch.isfinite(value).all()) for value in states[-1]["model"].values())
    assert not torch.equal(states[-1]["model"]["first.weight"], states[NAN_STEP]["model"]["first.weight"])


def test_bytes_are_what_travels(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]
    shapes = found["none"]["shapes"]
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    assert found["none"]["bytes"] == 4 * numel
    assert found["bf16"]["bytes"] == found["fp16"]["bytes"] == 2 * numel
    as_factors = [shape for shape in shapes if shape in ((17, 6), (17, 17))]
    saved = sum(n * m - 2 * (n + m) for n, m in as_factors)
    assert len(as_factors) == 3 and found["powersgd"]["bytes"] == 4 * (numel - saved)


class Said(nn.Module):
    """One matrix, and a parameter that carries numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.carrier = nn.Linear(40, 30, bias=False), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum() + (self.carrier * said).sum()


def rank_1(group: ProcessGroup, name: str, folder: Path) -> dict[str, Any]:
    """A model whose gradients on all ranks are of rank 1 travels through factors of rank 1 without loss."""
    from torch.nn.parallel import DistributedDataParallel

    from tandem.distributed.compression import compression, ddp_arguments

    found = {}
    for kind in ("none", "powersgd"):
        module = Said()
        config = ExchangeConfig(gradient_compression="powersgd:1" if kind == "powersgd" else kind)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, **ddp_arguments(config))
        compressed = compression(config, group)
        if compressed is not None:
            compressed.attach(ddp, module.carrier, dict(module.model.named_parameters()))
        x = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * (1 + group.rank)
        ddp(x, torch.tensor([1.0 + group.rank, 1e6 + 1, 0.1])).backward()
        found[kind] = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


@pytest.mark.soak
def test_what_has_the_rank_of_the_factors_arrives_whole(tmp_path: Path, free_port: int) -> None:
    for found in in_processes("ddp", 2, free_port, rank_1, tmp_path):
        (said, matrix), (plain_said, plain) = found["powersgd"], found["none"]
        torch.testing.assert_close(matrix, plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(said, plain_said)


def replicas(group: ProcessGroup, name: str, folder: Path) -> dict[str, Any]:
    """A wrapped model of a loop of one's own, whose numbers travel with its gradients."""
    found = {}
    for kind in ("none", "bf16", "fp16"):
        torch.manual_seed(0)
        piggybacked = PiggybackedValues(torch.zeros(3))
        replica = Replica(Said().model, group, piggybacked, ExchangeConfig(gradient_compression=kind))  # type: ignore[arg-type]
        for step in range(2):
            replica.zero_grad()
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step + group.rank))
            piggybacked.numbers = torch.tensor([1.0 + group.rank, 1e6 + 1, 0.1])
            replica.begin_backward()
            replica(x).square().sum().backward()
        means = replica.arrived()
        assert means is not None
        found[kind] = means.clone(), next(replica.parameters()).grad
    return found


def test_a_loop_of_ones_own_compresses_too(tmp_path: Path, free_port: int) -> None:
    ranks = in_processes("ddp", 2, free_port, replicas, tmp_path)
    for found in ranks:
        for kind, precision in (("bf16", 0.02), ("fp16", 0.003)):
            assert torch.equal(found[kind][0], found["none"][0])
            torch.testing.assert_close(found[kind][1], found["none"][1], rtol=precision, atol=1.0 * precision)
            assert torch.equal(found[kind][1], ranks[0][kind][1])
            assert not torch.equal(found[kind][1], found["none"][1])
    with pytest.raises(ConfigError, match="powersgd works only in tasks"):
        check_settings(Settings().replace(gradient_compression="powersgd"))


@pytest.mark.parametrize("name", ["single", "dp", "fsdp"])
def test_what_only_ddp_does_is_refused_elsewhere(name: str) -> None:
    require_strategy(name)
    group = ProcessGroup(Position(), torch.device("cpu"))
    for given, flag in (
        (ExchangeConfig(gradient_compression="bf16"), "--gradient-compression"),
        (ExchangeConfig(bucket_mb=5.0), "--bucket-mb"),
        (ExchangeConfig(find_unused=True), "--find-unused"),
    ):
        with pytest.raises(ConfigError, match=f"{flag} works only with --strategy ddp"):
            strategies.load(name, group, given)
    with pytest.raises(ConfigError, match="--precision bf16 or fp32"):
        check_together(ExchangeConfig(gradient_compression="powersgd"), ComputeConfig(precision="fp16"))


def test_a_compiled_model_wants_buckets_of_a_mebibyte() -> None:
    """torch asserted so with a stack trace, in the first step."""
    check_together(ExchangeConfig(bucket_mb=1), ComputeConfig(compile="default"))
    with pytest.raises(ConfigError, match="--bucket-mb: invalid value 0.5"):
        check_together(ExchangeConfig(bucket_mb=0.5), ComputeConfig(compile="default"))


class Some(nn.Module):
    """A model with a layer that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)


def unused(group: ProcessGroup, name: str, folder: Path) -> list[Any]:
    """The error of a layer never used; of one left out later; and the same with --find-unused."""
    import test_strategies

    found: list[Any] = []
    for settings, first in (({}, 0), ({}, 3), ({"find_unused": True}, 3)):
        calls = iter(range(10_000))

        def forward(model: Any, x: Any, first: int = first, calls: Any = calls) -> Any:
            use = next(calls) < 4 * first  # two micro-batches a step, and the step that settles
            return model.used(x) + (model.spare(x) if use else 0)

        Some.forward = forward  # type: ignore[method-assign]
        test_strategies.Blocks = lambda batchnorm: Some()  # type: ignore
        try:
            found.append(train(group, name, **settings).losses)  # type: ignore[arg-type]
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.parametrize(("name", "size"), [("ddp", 2), ("ddp_one_rank", 1)])
def test_parameters_without_a_gradient_are_named(
    name: str, size: int, tmp_path: Path, free_port: int
) -> None:
    for never, later, found in in_processes(name, size, free_port, unused, tmp_path):
        assert never[0] == "ConfigError" and "no gradient for spare.weight, spare.bias;" in never[1]
        assert "--find-unused" in never[1]
        assert later[0] == "UnusedParametersError" and "spare.weight, spare.bias" in later[1]
        assert len(found) == STEPS
