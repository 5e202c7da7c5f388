"""Small sets of tensors on the GPU: which ones, once, and with the batches that they have on the host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from played_gpu import Notes
from tandem.data import loader
from tandem.data.datasets import TensorImages, TensorRows
from tandem.data.loader import share_batches, train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
X = torch.arange(48.0).reshape(12, 4)
Y = torch.arange(12)
PICTURES = torch.arange(12 * 16, dtype=torch.uint8).reshape(12, 4, 4)


class Own(TensorDataset):
    """May compute anything with its rows."""


def sets() -> dict[str, Any]:
    return {
        "TensorDataset": TensorDataset(X, Y),
        "TensorRows": TensorRows(X, Y),
        "TensorImages": TensorImages(PICTURES, Y, [10.0], [3.0]),
        "a subset": Subset(TensorRows(X, Y), [11, 3, 5, 7, 2, 0]),
    }


def held(dataset: Any) -> list[Tensor]:
    return [each for each in vars(dataset).values() if isinstance(each, Tensor)] or list(dataset.tensors)


@pytest.mark.parametrize("name", sets())
def test_it_is_there_once_and_the_hosts_is_left_alone(name: str) -> None:
    dataset = sets()[name]
    there = loader.cached_on_device(dataset, META)
    assert there is loader.cached_on_device(dataset, META) and there is not dataset
    assert len(there) == len(dataset)
    assert [each.device for each in held(there)[:2]] == [META] * 2
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    assert {each.device for each in held(inner)} == {CPU} and loader.cached_on_device(dataset, CPU) is dataset


def test_what_is_large_computes_or_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    augmented = TensorImages(PICTURES, Y, [0.0], [1.0], augment=lambda pictures, keys: pictures)
    nested = Subset(Subset(TensorRows(X, Y), [1, 2]), [0])
    for dataset in (Own(X, Y), augmented, TensorDataset(X.to(META)), nested, [1, 2], range(3)):
        assert loader.cached_on_device(dataset, META) is dataset
    monkeypatch.setattr(loader, "MOST_BYTES", X.nbytes + Y.nbytes - 1)
    large = TensorRows(X, Y)
    assert loader.cached_on_device(large, META) is large


def test_only_indices_travel() -> None:
    """META's tensors know their place and have no numbers; a batch of the host's would have to be moved."""
    order = GlobalOrder(12, 6, seed=1)
    sampler = TrainBatches(order, rank=0, world_size=1, micro_batch_size=3, start_step=0, stop_step=2)
    for x, y in train_batches(TensorRows(X, Y), sampler, seed=1, device=META):
        assert (x.device, y.device, x.shape) == (META, META, (3, 4))
    there = loader.cached_on_device(TensorRows(X, Y), META)
    assert there.__getitems__(torch.tensor([1, 2]))[0].device == META


@pytest.mark.parametrize("name", sets())
def test_batches_are_those_of_the_host(name: str, gpu: Notes) -> None:
    def all_of(device: torch.device) -> list[Any]:
        dataset = sets()[name]
        order = GlobalOrder(len(dataset), 6, seed=1)
        sampler = TrainBatches(order, rank=0, world_size=1, micro_batch_size=3, start_step=0, stop_step=4)
        trained = list(train_batches(dataset, sampler, seed=1, device=device))
        return trained + list(share_batches(dataset, 0, 2, 2, device=device))

    expected, found = all_of(CPU), all_of(GPU)
    assert len(expected) == len(found) > 8
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
    assert "data/loader.py:<lambda>" in gpu.counts["copy"]
