"""Batches: the same samples and the same randomness whatever the ranks, micro-batches and workers."""

import contextlib
import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tandem import process
from tandem.config.slices import DataConfig
from tandem.data.datasets import TensorImages, TensorRows, random_crop_flip
from tandem.data.fetch import returns_batches
from tandem.data.host_generators import KeptGenerators
from tandem.data.kinds import evaluation_batches, takes_workers, training_data
from tandem.data.loader import loader_processes, to_device, train_batches
from tandem.data.loader_messages import SENT_AS_BYTES
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.seeds import derive_seed
from tandem.data.source import BatchReader
from tandem.errors import ConfigError

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


class Collecting(Noisy):
    """Looks for garbage in the worker that makes a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("wanted", "cores", "processes"),
    [("auto", 1, 0), ("auto", 4, 3), ("auto", 64, 8), (0, 64, 0), (12, 1, 12)],
)
def test_workers_by_themselves_leave_a_cpu_to_the_rank(wanted: Any, cores: int, processes: int) -> None:
    reader = BatchReader(DataConfig(batch_size=10, workers=wanted), 5, 0, 1, None, CPU)
    reader.cores = cores
    assert reader.workers == loader_processes(wanted, cores) == processes


class Whose(Noisy):
    """A sample with the number of the process that has made it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return super().__getitem__(index), os.getpid()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_by_themselves_load_the_same_samples_in_the_same_order() -> None:
    made = {}
    for cores in (1, 2, 4):
        reader = BatchReader(DataConfig(batch_size=10, workers="auto"), 5, 0, 1, None, CPU)
        reader.cores = cores
        steps = list(training_data(Whose(), reader, 4).steps(0, 4))
        made[cores] = [batch[0].tolist() for step in steps for batch in step]
        processes = {pid for step in steps for batch in step for pid in batch[1].tolist()}
        assert processes == {os.getpid()} if cores == 1 else len(processes) == cores - 1
    assert made[1] == made[2] == made[4]


def test_only_data_that_are_loaded_by_the_sample_take_workers() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(40))

        def __len__(self) -> int:
            return 40

    class Part(Stream):
        def of_rank(self, rank: int, world_size: int) -> "Part":
            return self

    rows = TensorDataset(torch.arange(40.0))
    datasets = [(Noisy(), None), (rows, default_collate), (rows, None), (Stream(), None), (Part(), None)]
    assert [takes_workers(*each) for each in datasets] == [True, True, False, False, False]
    for dataset in (Stream(), Part()):  # a number above 0 is refused there
        reader = BatchReader(
            DataConfig(batch_size=10, workers="auto"), 5, 0, 1, None, CPU, lambda mine: [mine]
        )
        assert len(list(training_data(dataset, reader, 4).steps(0, 4))) == 4


def test_a_worker_does_not_end_what_is_garbage_in_the_rank(tmp_path: Path) -> None:
    """As it would with torch's store server, whose destructor joins a thread that a fork has not."""

    class Server:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    gc.collect()
    gc.disable()
    try:
        Server()
        run(Collecting(), workers=1, stop=1)
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_no_global_generator_is_moved() -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    run(Noisy())
    run(TensorRows(torch.rand(20, 2, generator=torch.Generator()), torch.zeros(20, 2)).inputs)
    list(evaluation_batches(Noisy(), 0, 2, 4, device=CPU))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_generators_are_put_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), KeptGenerators():
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(before, torch.get_rng_state())


class OfEpoch(Dataset[torch.Tensor]):
    """A sample is its epoch and a number that was drawn for the epoch."""

    epoch, drawn = -1, 0.0

    def __len__(self) -> int:
        return 20

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, random.random() + float(numpy.random.rand()) + float(torch.rand(()))

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.epoch), self.drawn])


class OfEpochAtOnce(OfEpoch):
    def __getitems__(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.stack([self[int(index)] for index in indices])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OfEpoch, OfEpochAtOnce])
def test_a_dataset_is_told_its_epoch_in_each_process_and_after_a_resume(
    kind: type[OfEpoch], workers: int
) -> None:
    def batches(dataset: Any, start: int) -> list[torch.Tensor]:
        cut = TrainBatches(GlobalOrder(len(dataset), 4, 0), 0, 1, None, start, 15)
        return list(train_batches(dataset, cut, seed=0, workers=workers, device=CPU))

    calm = batches(kind(), 0)
    assert [batch[:, 0].tolist() for batch in calm] == [[float(step // 5)] * 4 for step in range(15)]
    resumed = batches(kind(), 7)
    assert all(torch.equal(*pair) for pair in zip(calm[7:], resumed, strict=True))
    whole = kind()
    parts: Any = ConcatDataset([Subset(whole, range(10)), Subset(whole, range(10, 20))])
    assert [batch[0, 0].item() for batch in batches(parts, 0)] == [step // 5 for step in range(15)]


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
    assert returns_batches(rows) and returns_batches(Subset(rows, [1, 2]))
    plain = TensorDataset(torch.zeros(4, 1))
    assert not returns_batches(plain) and not returns_batches(Subset(plain, [1, 2]))

    class Listing(TensorRows):
        def __getitems__(self, indices):  # as torch's own convention has it
            return [self[index] for index in indices]

    assert not returns_batches(Listing(rows.inputs, rows.targets))


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


class Listing(Dataset[torch.Tensor]):
    """Lists samples, as torch's convention has it; draws from the generators that `draws` names.

    `sometimes`: only samples of an index that this number divides draw. `asked`: for how many, each time.
    """

    def __init__(self, draws: frozenset[str], sometimes: int = 1, batched: bool = True) -> None:
        self.draws, self.sometimes, self.asked = draws, sometimes, []
        if batched:
            self.__getitems__ = self._listed

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(1)
        return self._sample(int(index))

    def _listed(self, indices) -> list[torch.Tensor]:
        self.asked.append(len(indices))
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> torch.Tensor:
        numbers = [float(index), 0.0, 0.0, 0.0]
        if index % self.sometimes == 0:
            numbers[1] = torch.rand(()).item() if "torch" in self.draws else 0.0
            numbers[2] = random.gauss() if "random" in self.draws else 0.0
            numbers[3] = numpy.random.randn() if "numpy" in self.draws else 0.0
        return torch.tensor(numbers, dtype=torch.float64)


def seeded_sample(dataset: Dataset[torch.Tensor], seed: int, epoch: int, index: int) -> list[float]:
    """The definition: all three generators seeded for this sample alone."""
    derived = derive_seed(seed, epoch, index)
    torch.manual_seed(derived)
    random.seed(derived)
    numpy.random.seed(derived & 0xFFFFFFFF)
    return dataset[index].tolist()


generators = st.frozensets(st.sampled_from(["torch", "random", "numpy"]))


@pytest.mark.slow
@given(
    generators, st.integers(1, 9), st.booleans(), st.integers(1, 5), st.none() | st.integers(1, 9), st.data()
)
@settings(deadline=None, max_examples=60)
def test_a_sample_is_a_function_of_seed_epoch_and_index(
    draws: frozenset[str],
    sometimes: int,
    batched: bool,
    world_size: int,
    micro: int | None,
    data: st.DataObject,
) -> None:
    start = data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 2**63 - 1))
    dataset = Listing(draws, sometimes, batched)
    got = run(dataset, world_size, micro, start, 6, seed)
    order = GlobalOrder(23, 10, seed)
    keys = [(step // 2, index) for step in range(start, 6) for index in order.batch(step)[1].tolist()]
    assert got == sorted(seeded_sample(Listing(draws, sometimes), seed, *key) for key in keys)


@pytest.mark.parametrize("draws", [frozenset(), frozenset({"random"}), frozenset({"torch", "numpy"})])
def test_workers_give_the_samples_of_one_process(draws: frozenset[str]) -> None:
    expected = run(Listing(draws, 7))
    assert run(Listing(draws, 7), workers=2) == expected == run(Listing(draws, 7, batched=False), workers=2)


def test_samples_of_version_0_1_are_drawn_again() -> None:
    """A resume across versions augments in the same way: change these numbers knowingly."""
    sampler = TrainBatches(GlobalOrder(23, 10, 5), 1, 2, 3, 3, 5)
    collate = lambda samples: torch.cat([torch.stack(samples), masked(samples)], dim=1)  # noqa: E731
    last = list(train_batches(Noisy(), sampler, seed=5, collate=collate, device=CPU))[-1][-1].tolist()
    samples, batch = (
        [0.5192123651504517, 0.8748191915893313, 0.9434344236476565],
        [0.8758097290992737, 0.8646682832219572, 0.33935863440728287],
    )
    assert last == torch.tensor([2.0, *samples, 2.0, *batch]).tolist()


def test_a_listing_dataset_is_asked_in_one_piece_until_it_draws() -> None:
    quiet, drawing = Listing(frozenset()), Listing(frozenset({"numpy"}))
    run(quiet)
    assert quiet.asked == [1, 10, 10, 10, 10], "the first is the question whether it gives finished batches"
    run(drawing)
    assert drawing.asked == [1, 10, *[1] * 40]


def test_generators_are_saved_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = []
    save = KeptGenerators.__enter__
    monkeypatch.setattr(KeptGenerators, "__enter__", lambda self: saves.append(1) or save(self))
    run(Noisy())
    assert len(saves) == 4


class Own(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor[index] + 100 for tensor in self.tensors)


def indexed_sets(draw_tensors) -> st.SearchStrategy[Dataset]:
    """TensorDatasets of 12 rows, subsets and stacks of them, and classes that only look like these."""
    plain = draw_tensors.map(lambda tensors: TensorDataset(*tensors))
    own = draw_tensors.map(lambda tensors: Own(*tensors))
    subsets = lambda inner: st.builds(  # noqa: E731
        Subset, inner, st.lists(st.integers(0, 11), min_size=12, max_size=12)
    )
    stacks = lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(  # noqa: E731
        lambda parts: st.sampled_from(
            [StackDataset(*parts), StackDataset(**{f"part{i}": part for i, part in enumerate(parts)})]
        )
    )
    return st.recursive(plain | own, lambda inner: subsets(inner) | stacks(inner), max_leaves=4)


shapes = st.sampled_from([(12,), (12, 3), (12, 2, 2)])
kinds = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64])
tensors = st.builds(
    lambda shape, kind: torch.arange(48).flip(0)[: torch.Size(shape).numel()].view(shape).to(kind),
    shapes,
    kinds,
)


@given(indexed_sets(st.lists(tensors, min_size=1, max_size=3)), st.integers(0, 3))
@settings(deadline=None)
def test_rows_asked_in_one_piece_are_what_default_collate_makes(dataset: Dataset, seed: int) -> None:
    order = GlobalOrder(12, 5, seed)
    [batch] = train_batches(dataset, TrainBatches(order, 0, 1, None, 1, 2), seed=seed, device=CPU)
    expected = default_collate([dataset[index] for index in order.batch(1)[1].tolist()])
    torch.testing.assert_close(batch, expected, rtol=0, atol=0)
    [batch, *_] = evaluation_batches(dataset, 1, 2, 4, device=CPU)
    torch.testing.assert_close(batch, default_collate([dataset[i] for i in (1, 3, 5, 7)]), rtol=0, atol=0)


def test_a_tensor_dataset_is_never_asked_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise AssertionError("asked for one sample")

    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    rows = TensorDataset(torch.arange(30.0).view(30, 1), torch.arange(30))
    for dataset in (rows, Subset(rows, range(3, 28)), Subset(Subset(rows, range(29)), range(28))):
        for workers in (0, 2):
            sampler = TrainBatches(GlobalOrder(len(dataset), 20, 0), 0, 1, None, 0, 2)
            batches = list(train_batches(dataset, sampler, seed=0, workers=workers, device=CPU))
            assert [len(batch[0]) for batch in batches] == [20, 20]
        assert sum(len(batch[1]) for batch in evaluation_batches(dataset, 0, 1, 7, device=CPU)) == len(
            dataset
        )


def test_a_collate_function_gets_the_rows_of_a_tensor_dataset() -> None:
    rows = TensorDataset(torch.arange(30.0).view(30, 1), torch.arange(30))
    batches = evaluation_batches(rows, 0, 1, 20, collate=lambda samples: {"n": len(samples)}, device=CPU)
    assert [batch["n"] for batch in batches] == [20, 10]


class OfAllKinds(Dataset[Any]):
    """Samples of which a loader process sends some tensors in its message, and others through /dev/shm."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(12.0) + index
        negated = (row * 1j)[:1].conj().imag
        same = torch.tensor(index)
        return {
            "types": [row.to(dtype) for dtype in (*SENT_AS_BYTES, torch.complex64, torch.float8_e5m2)],
            "shapes": [row[:0], row[0], row.view(3, 4), row.view(3, 4).t(), row[::2]],
            "negated": negated,
            "large": row.repeat(10_000),
            "sparse": row.to_sparse(),
            "nested": torch.nested.nested_tensor([row[:3], row[:5]]),
            "same": (same, same),
        }


def test_a_loader_process_sends_tensors_of_every_kind() -> None:
    """Small ones as bytes. Values, types, shapes and strides are those of a batch made in the rank."""

    def batches(workers: int) -> list[Any]:
        sampler = TrainBatches(GlobalOrder(20, 10, 0), 0, 1, None, 0, 2)
        made = train_batches(
            OfAllKinds(), sampler, seed=0, workers=workers, collate=lambda rows: rows, device=CPU
        )
        return [row for batch in made for row in batch]

    for here, sent in zip(batches(0), batches(2), strict=True):
        for name, part in here.items():
            ours, theirs = (part, sent[name]) if isinstance(part, list | tuple) else ([part], [sent[name]])
            for one, other in zip(ours, theirs, strict=True):
                if one.is_nested:
                    one, other = (each.to_padded_tensor(-1) for each in (one, other))
                assert one.dtype == other.dtype and one.shape == other.shape, name
                assert torch.equal(one.to_dense().to(torch.complex128), other.to_dense().to(torch.complex128))
                assert name in ("sparse", "negated") or one.stride() == other.stride(), name
        assert sent["same"][0] is sent["same"][1]
        assert sent["large"].is_shared() and not any(row.is_shared() for row in sent["types"][:10])
        assert all(row.data_ptr() % 64 == 0 for row in sent["types"][:10])


class Sparse(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.eye(3).mul(index).to_sparse(), torch.tensor(index)


def test_small_sparse_samples_make_a_batch_in_a_loader_process() -> None:
    def batch(workers: int) -> Any:
        sampler = TrainBatches(GlobalOrder(23, 10, 0), 0, 1, None, 0, 1)
        return next(train_batches(Sparse(), sampler, seed=0, workers=workers, device=CPU))

    (here, labels), (sent, same) = batch(0), batch(1)
    assert torch.equal(here.to_dense(), sent.to_dense()) and torch.equal(labels, same)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", [lambda: 1, torch.ones(3, requires_grad=True) * 2])
def test_a_batch_that_cannot_be_sent_is_an_error(what: Any) -> None:
    """The rank waited for it forever, because torch's queue only prints such an error."""
    sampler = TrainBatches(GlobalOrder(23, 10, 0), 0, 1, None, 0, 2)
    batches = train_batches(
        Noisy(), sampler, seed=0, workers=1, collate=lambda rows: (torch.stack(rows), what), device=CPU
    )
    with pytest.raises(ConfigError, match="^a batch cannot be sent from a loader process: .*; let the"):
        next(batches)


class Holding(Noisy):
    """How many descriptors of /dev/zero and of /dev/full the process that makes a sample has."""

    def __getitem__(self, index: int) -> torch.Tensor:
        names = []
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{each}"))
        return torch.tensor([index, names.count("/dev/zero"), names.count("/dev/full")])


def test_loader_processes_hold_no_device_file_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver frees a killed rank's memory when nobody has its files open: /dev/zero plays one."""
    monkeypatch.setattr(process, "DEVICE_FILES", ("/dev/zero", "/dev/infiniband/"))
    with open("/dev/zero", "rb") as gpu, open("/dev/zero", "rb") as twice, open("/dev/full", "rb"):
        assert {tuple(row[1:]) for row in run(Holding(), workers=2)} == {(0, 1)}
        assert gpu.read(1) == twice.read(1) == b"\0"  # the rank keeps its own
