"""BatchNorm over the global batch on CPUs: what one process gives with the whole batch."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import Scripts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import in_ranks
from program_files import program_text
from tandem.distributed.batchnorm import SynchronizedBatchNorm
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

BATCH, CHANNELS, STEPS = 16, 5, 2
LAYERS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "rows": (nn.BatchNorm1d, ()),
    "sequences": (nn.BatchNorm1d, (7,)),
    "pictures": (nn.BatchNorm2d, (4, 3)),
    "volumes": (nn.BatchNorm3d, (2, 3, 2)),
}
SHARES = {2: [(8, 8), (11, 5), (16, 0)], 3: [(6, 5, 5)]}
OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None, "affine": False, "eps": 0.1},
]


class Mixed(nn.Module):
    """A batch norm between two layers, so that its input's gradient shows in the weights before it."""

    def __init__(self, kind: type[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.before = nn.Linear(3, CHANNELS)
        self.norm = kind(CHANNELS, **options)
        self.after = nn.Linear(CHANNELS, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, ..., 3] -> [N, ..., 2]"""
        channels_first = self.before(x).movedim(-1, 1)
        out: Tensor = self.after(self.norm(channels_first).movedim(1, -1).sigmoid())
        return out


def batches(size: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(BATCH, *size, 3, generator=generator).to(dtype) * 3 + 2,
            torch.randn(BATCH, *size, 2, generator=generator).to(dtype),
        )
        for _ in range(STEPS)
    ]


def trained(model: nn.Module, data: list[tuple[Tensor, Tensor]], part: slice, ranks: int) -> list[Tensor]:
    """Gradients and statistics after every step, then what it gives in evaluation."""
    seen = []
    parameters = dict(model.named_parameters())
    for x, y in data:
        model.zero_grad()
        loss = (model(x[part]) - y[part]).square().sum() * ranks / BATCH
        loss.backward()
        seen += [p.grad.clone() for p in parameters.values() if p.grad is not None]
        seen += [buffer.clone() for buffer in model.buffers()]
    model.eval()
    seen.append(model(data[0][0]).detach())
    model.train()
    return seen


def cases(group: ProcessGroup) -> dict[str, Any]:
    """What is furthest from one process with the whole batch, by case; and all that ranks should share."""
    found, bits = {}, []
    product = [(name, OPTIONS[0], torch.float32) for name in LAYERS]
    product += [("pictures", options, torch.float32) for options in OPTIONS[1:] if group.size == 2]
    product += [("pictures", {}, torch.float64)] * len(SHARES[group.size])
    for shares, (name, options, dtype) in zip(itertools.cycle(SHARES[group.size]), product):
        kind, size = LAYERS[name]
        torch.manual_seed(0)
        alone = Mixed(kind, options).to(dtype)
        mine = group.synchronize_batchnorm(copy.deepcopy(alone))
        assert isinstance(mine.norm, SynchronizedBatchNorm)
        start = sum(shares[: group.rank])
        part = slice(start, start + shares[group.rank])
        wrapped = DistributedDataParallel(mine, gradient_as_bucket_view=True)
        data = batches(size, dtype)
        ours, theirs = trained(wrapped, data, part, group.size), trained(alone, data, slice(None), 1)
        if not options.get("track_running_stats", True):
            ours, theirs = ours[:-1], theirs[:-1]  # of the batch in evaluation as well, and DDP's is whole
        differences = [
            float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))
            for a, b in zip(ours, theirs, strict=True)
        ]
        found[f"{name} {options} {shares} {dtype}"] = max(differences)
        assert list(mine.state_dict()) == list(alone.state_dict())
        bits.append(torch.cat([each.double().flatten() for each in ours]))
    return {"found": found, "bits": torch.cat(bits)}


def oddities(group: ProcessGroup) -> dict[str, Any]:
    """Mistakes and corners, each the same on both ranks."""

    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    shared = nn.BatchNorm1d(2)
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(shared, nn.Linear(2, 2), shared, Own(2))
    same = group.synchronize_batchnorm(model)
    model(torch.ones(3, 2) * group.rank)
    one_value = ""
    try:
        nn.Sequential(model[0])(torch.ones(1 - group.rank, 2))
    except ValueError as error:
        one_value = str(error)
    half = group.synchronize_batchnorm(nn.BatchNorm1d(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(4, 2, dtype=torch.bfloat16, requires_grad=True)
        out = half(x)
        out.float().square().sum().backward()
    assert x.grad is not None
    left = type(model[3]) is Own and model[0] is model[2] and same is model
    return {
        "left": left, "calls": len(calls), "one value": one_value, "tracked": int(shared.num_batches_tracked),
        "half": (str(out.dtype), str(x.grad.dtype)), "mean": shared.running_mean,
    }  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_statistics_and_gradients_are_those_of_one_process(size: int, free_port: int, tmp_path: Path) -> None:
    ranks = in_ranks(cases, size, free_port, tmp_path)
    assert all(torch.equal(each["bits"], ranks[0]["bits"]) for each in ranks)  # so replicas stay replicas
    assert len(ranks[0]["found"]) >= 5
    for case, difference in ranks[0]["found"].items():
        assert difference < (1e-12 if "float64" in case else 1e-6), case


def test_corners(free_port: int, tmp_path: Path) -> None:
    first, second = in_ranks(oddities, 2, free_port, tmp_path)
    assert first["left"] and first["calls"] == 2 and first["tracked"] == 2
    assert first["one value"].startswith("expected more than 1 value per channel")
    assert second["one value"].startswith("expected more than 1 value per channel")
    assert first["half"] == ("torch.bfloat16", "torch.bfloat16")
    assert torch.equal(first["mean"], second["mean"]) and bool(first["mean"].any())


LOOP = program_text("batchnorm_loop")


@pytest.mark.soak
def test_a_loop_of_ones_own_honours_the_setting(
    tmp_path: Path, processes: Any, module_ports: list[int]
) -> None:
    """Its BatchNorm keeps the name that the script has for it, and ranks have the same statistics."""
    scripts = Scripts(tmp_path, processes)
    scripts.write("loop.py", LOOP)
    ranks = scripts.ranks("loop.py", "two", module_ports[0], TANDEM_SYNC_BATCHNORM="true")
    assert [code for code, _ in ranks] == [0, 0], ranks[0][1]
    first, second = ((tmp_path / f"means-{rank}").read_text() for rank in (0, 1))
    assert len(first) > 320 and first == second  # each of its own share otherwise


def test_one_rank_keeps_its_layers() -> None:
    group = ProcessGroup(Position(), torch.device("cpu"))
    model = nn.BatchNorm1d(3)
    assert type(group.synchronize_batchnorm(model)) is nn.BatchNorm1d
