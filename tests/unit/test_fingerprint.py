"""A training set that is another one than the checkpoint's shows; the same one, made anew, does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from tandem.data import fingerprint
from tandem.data.datasets import TensorImages, TensorRows
from tandem.data.fingerprint import changed, reordered
from tandem.data.sampler import FEISTEL, TORCH, GlobalOrder

SHUFFLE = GlobalOrder(100, 10, 0)


def data_facts(dataset: Any) -> dict[str, Any]:
    return fingerprint.data_facts(dataset, SHUFFLE)


def rows(count: int = 100, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def images(seed: int = 1) -> TensorImages:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (100, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorImages(pictures, torch.arange(100) % 10, [0.1], [0.3])


class Listed(Dataset[Any]):
    def __init__(self, name: str, values: list[Any]) -> None:
        setattr(self, name, values)
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample may be dear, or random")


def files(folder: str, first: int = 0) -> Listed:
    return Listed("samples", [(f"{folder}/cat/{number}.jpg", 0) for number in range(first, first + 100)])


def split(seed: int) -> Subset[Any]:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
    return Subset(TensorDataset(rows(200)), order[:100].tolist())


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "tensors": (lambda: TensorDataset(rows()), lambda: TensorDataset(rows(seed=2))),
    "labels": (
        lambda: TensorDataset(rows(), torch.arange(100)),
        lambda: TensorDataset(rows(), torch.arange(100).flip(0)),
    ),
    "rows": (lambda: TensorRows(rows(), rows()), lambda: TensorRows(rows(seed=2), rows())),
    "images": (images, lambda: images(2)),
    "a split": (lambda: split(1), lambda: split(2)),
    "parts put together": (
        lambda: ConcatDataset([TensorDataset(rows(60)), TensorDataset(rows(40))]),
        lambda: ConcatDataset([TensorDataset(rows(40)), TensorDataset(rows(60))]),
    ),
    "stacked": (
        lambda: StackDataset(TensorDataset(rows())),
        lambda: StackDataset(TensorDataset(rows(seed=3))),
    ),
    "files": (lambda: files("data/train"), lambda: files("data/train", 1)),
    "targets": (
        lambda: Listed("targets", [number % 10 for number in range(100)]),
        lambda: Listed("targets", [number % 7 for number in range(100)]),
    ),
    "a list": (lambda: list(rows()), lambda: list(rows(seed=2))),
}


def saved(dataset: Any) -> Any:
    """As a manifest gives it back."""
    return json.loads(json.dumps(data_facts(dataset), allow_nan=False))


@pytest.mark.parametrize("one, other", PAIRS.values(), ids=PAIRS.keys())
def test_other_samples_show_and_the_same_ones_do_not(one: Any, other: Any) -> None:
    assert changed(saved(one()), data_facts(one())) == ""
    assert "different samples" in changed(saved(one()), data_facts(other()))


def test_another_length_shows() -> None:
    said = changed(saved(TensorDataset(rows(480))), data_facts(TensorDataset(rows(360))))
    assert "480" in said and "360" in said
    assert "480" in changed({"samples": 480}, data_facts(TensorDataset(rows(360)))), "of an older version"


def test_the_last_bits_of_another_machine_are_no_difference() -> None:
    assert changed(saved(TensorDataset(rows())), data_facts(TensorDataset(rows() * (1 + 1e-6)))) == ""
    assert changed(saved(files("/here/train")), data_facts(files("/there/train"))) == ""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class Parts:
    def of_rank(self, rank: int, world_size: int) -> Any:
        return []


class Dear(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it is not asked")


def test_what_is_not_cheap_is_not_looked_at(tmp_path: Path) -> None:
    assert data_facts(Stream()) == {} == data_facts(Parts())
    assert data_facts(Dear()) == {"samples": 3, "order": TORCH, "probe": []}
    assert data_facts([]) == {"samples": 0, "order": TORCH, "probe": []}
    assert changed({}, data_facts(TensorDataset(rows()))) == "" == changed(saved(TensorDataset(rows())), {})
    odd = TensorDataset(torch.full((3, 2), float("nan")), torch.empty(3, 0))
    assert changed(saved(odd), data_facts(odd)) == ""


@pytest.mark.parametrize(
    ("saved", "now", "differs"),
    [
        ({"samples": 3}, TORCH, False),  # of a version that knew no other
        ({"samples": 3}, FEISTEL, True),
        ({"samples": 3, "order": FEISTEL}, FEISTEL, False),
        ({"samples": 3, "order": FEISTEL}, TORCH, True),
        ({"samples": 3, "order": ["odd"]}, TORCH, True),
        ({}, FEISTEL, False),  # a snapshot of this launch, or a dataset that has its own order
        ({"samples": 3}, None, False),
    ],
)
def test_another_algorithm_of_the_order_shows(saved: Any, now: str | None, differs: bool) -> None:
    assert bool(reordered(saved, {"order": now} if now else {})) is differs
