"""Batches: the same samples and the same randomness whatever the ranks, micro-batches and workers."""

import os
import random
import signal
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from tandem.data.datasets import TensorImages, TensorRows, random_crop_flip
from tandem.data.loader import answers_in_batches, evaluation_batches, seeded, to_device, train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches

CPU = torch.device("cpu")


class Noisy(Dataset[torch.Tensor]):
    """Index and one number of each global generator: what a user's augmentation would draw."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


def run(dataset, world_size=1, micro=None, start=0, stop=4, seed=5, workers=0) -> list[torch.Tensor]:
    """All rows of the steps, over all ranks, in the order of the first number."""
    order = GlobalOrder(len(dataset), 10, seed)
    rows = []
    for rank in range(world_size):
        sampler = TrainBatches(order, rank, world_size, micro, start, stop)
        rows += list(train_batches(dataset, sampler, seed=seed, workers=workers, device=CPU))
    return sorted(torch.cat(rows).tolist())


def test_randomness_is_the_same_for_any_ranks_micro_batches_and_workers() -> None:
    expected = run(Noisy())
    assert run(Noisy(), world_size=3, micro=2) == expected
    assert run(Noisy(), workers=2) == expected
    assert sorted(run(Noisy(), stop=1) + run(Noisy(), start=1)) == expected
    assert run(Noisy(), seed=6) != expected


def test_no_global_generator_is_moved() -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    run(Noisy())
    run(TensorRows(torch.rand(20, 2, generator=torch.Generator()), torch.zeros(20, 2)).inputs)
    list(evaluation_batches(Noisy(), 0, 2, 4, device=CPU))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_generators_are_put_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(1):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(before, torch.get_rng_state())


def test_a_dataset_that_answers_in_batches_is_asked_directly() -> None:
    images = TensorImages(torch.zeros(20, 2, 2, dtype=torch.uint8), torch.arange(20), [0.5], [0.5])
    order = GlobalOrder(20, 10, 0)
    inputs, labels = next(
        iter(train_batches(images, TrainBatches(order, 0, 1, None, 0, 1), seed=0, device=CPU))
    )
    assert inputs.shape == (10, 1, 2, 2)
    assert labels.tolist() == order.batch(0)[1].tolist()


def test_only_finished_batches_count_as_answers() -> None:
    rows = TensorRows(torch.zeros(4, 1), torch.zeros(4))
    assert answers_in_batches(rows) and answers_in_batches(Subset(rows, [1, 2]))
    plain = TensorDataset(torch.zeros(4, 1))
    assert not answers_in_batches(plain) and not answers_in_batches(Subset(plain, [1, 2]))

    class Listing(TensorRows):
        def __getitems__(self, indices):  # as torch's own convention has it
            return [self[index] for index in indices]

    assert not answers_in_batches(Listing(rows.inputs, rows.targets))


def test_augmentation_is_kept_behind_a_subset() -> None:
    pictures = torch.randint(256, (30, 8, 8, 1), dtype=torch.uint8)
    whole = TensorImages(pictures, torch.arange(30), [0.5], [0.5], random_crop_flip)
    part = Subset(whole, list(range(5, 25)))
    order = GlobalOrder(20, 20, 1)
    sampler = TrainBatches(order, 0, 1, None, 0, 1)
    images, labels = next(iter(train_batches(part, sampler, seed=1, device=CPU)))
    assert torch.equal(images, whole.augmented(order.batch(0)[1] + 5, 0, 1)[0])
    assert sorted(labels.tolist()) == list(range(5, 25))


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
@pytest.mark.parametrize("dataset", [Noisy(), TensorRows(torch.arange(23.0).view(23, 1), torch.zeros(23))])
def test_evaluation_sees_each_sample_once_without_padding(dataset: object, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        for batch in evaluation_batches(dataset, rank, world_size, 4, device=CPU):
            rows = batch[0] if isinstance(batch, tuple) else batch
            assert len(rows) <= 4
            seen += [int(row[0]) for row in rows]
    assert sorted(seen) == list(range(23))


def test_a_collate_function_makes_the_batches() -> None:
    batches = evaluation_batches(Noisy(), 0, 1, 10, collate=lambda samples: {"n": len(samples)}, device=CPU)
    assert [batch["n"] for batch in batches] == [10, 10, 3]


class WorkerPid(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def test_workers_outlive_a_stop_signal() -> None:
    """The rank needs batches until all ranks have agreed on the step to stop at."""
    sampler = TrainBatches(GlobalOrder(23, 10, 0), 0, 1, None, 0, 30)
    batches = train_batches(WorkerPid(), sampler, seed=0, workers=1, device=CPU)
    worker = int(next(batches)[0])
    assert worker != os.getpid()
    os.kill(worker, signal.SIGTERM)
    assert {int(batch[0]) for batch in batches} == {worker}


def test_nested_batches_are_moved_whole() -> None:
    class Pair(NamedTuple):
        a: torch.Tensor
        b: list[torch.Tensor]

    batch = {"pair": Pair(torch.zeros(1), [torch.zeros(2)]), "name": "x", "both": (torch.zeros(3), 4)}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair) and moved["pair"].b[0].device.type == "meta"
    assert moved["name"] == "x" and moved["both"][0].is_meta and moved["both"][1] == 4


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws, from each of the global generators."""
    drawn = torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()])
    return torch.stack([torch.cat([sample[:1], drawn]) for sample in samples])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_collate_function_draws_the_same_after_a_resume(workers: int) -> None:
    def rows(start: int) -> list[list[float]]:
        sampler = TrainBatches(GlobalOrder(23, 10, 5), 0, 1, 5, start, 4)
        loaded = train_batches(Noisy(), sampler, seed=5, workers=workers, collate=masked, device=CPU)
        return torch.cat(list(loaded)).tolist()

    assert rows(0)[30:] == rows(3)
    assert len({row[1] for row in rows(0)}) == 8, "each micro-batch draws its own"


def test_a_dataset_that_answers_in_batches_draws_the_same_after_a_resume() -> None:
    class Vectorised(TensorRows):
        def __getitems__(self, indices):
            return self.inputs[indices] + torch.rand(()) + random.random() + numpy.random.rand()

    def rows(start: int) -> list[list[float]]:
        dataset = Vectorised(torch.arange(23.0).view(23, 1), torch.zeros(23))
        sampler = TrainBatches(GlobalOrder(23, 10, 5), 0, 1, 5, start, 4)
        return torch.cat(list(train_batches(dataset, sampler, seed=5, device=CPU))).tolist()

    assert rows(0)[30:] == rows(3)
