"""What trains, by global step: streams and map-style data, the same after a resume and at any world size."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from tandem.checkpoint.state import flatten, unflatten
from tandem.config.slices import DataConfig
from tandem.data.kinds import evaluation_batches, training_data
from tandem.data.source import BatchReader
from tandem.errors import ConfigError

CPU = torch.device("cpu")
LENGTH = 47


class Plain(IterableDataset[torch.Tensor]):
    """Its own number, the epoch, and draws; mixed by a buffer of its own that no state tells of."""

    def __init__(self) -> None:
        self.epoch, self.read = -1, 0

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        for number in range(LENGTH):
            self.read += 1
            buffer.append(number)
            if len(buffer) > 3:
                yield self.sample(buffer.pop(random.randrange(len(buffer))))
        yield from map(self.sample, buffer)

    def sample(self, number: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
        return torch.tensor([number, self.epoch, *drawn], dtype=torch.float64)


class Telling(Plain):
    """The same numbers in order; the dataset says where it stands, and begins there after load_state_dict."""

    at, told = 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.told = self.at if self.told else 0, False
        while self.at < LENGTH:
            self.read += 1
            self.at += 1
            yield self.sample(self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.told = state["at"], True


class Shuffling(Plain):
    """Its iterator says where it stands, and keeps a buffer with tensors in it."""

    def __iter__(self) -> "ShufflingIterator":
        return ShufflingIterator(self)


class ShufflingIterator:
    def __init__(self, dataset: Plain) -> None:
        self.dataset, self.at, self.buffer = dataset, 0, []

    def __iter__(self) -> "ShufflingIterator":
        return self

    def __next__(self) -> torch.Tensor:
        while self.at < LENGTH and len(self.buffer) < 5:
            self.dataset.read += 1
            self.buffer.append(self.dataset.sample(self.at))
            self.at += 1
        if not self.buffer:
            raise StopIteration
        return self.buffer.pop(random.randrange(len(self.buffer)))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])


class Rows(TensorDataset):
    """Map-style: the other implementation."""

    def __init__(self) -> None:
        super().__init__(torch.arange(LENGTH * 2.0).view(LENGTH, 2))


KINDS: list[Callable[[], Any]] = [Plain, Telling, Shuffling, Rows]


def opened(kind: Callable[[], Any], rank: int, world_size: int, micro: int | None, **more: Any):
    """(dataset, training data) of one rank; `more` are planned steps and a collate function."""
    dataset = kind()
    config = DataConfig(batch_size=10, micro_batch_size=micro, workers=more.get("workers", 0))
    reader = BatchReader(config, 5, rank, world_size, more.get("collate"), CPU)
    return dataset, training_data(dataset, reader, more.get("planned"))


def rows_of(batches: list[Any]) -> list[list[float]]:
    return [row for batch in batches for row in (batch[0] if isinstance(batch, list) else batch).tolist()]


@given(st.sampled_from(KINDS), st.integers(1, 4), st.none() | st.integers(1, 4), st.integers(0, 9), st.data())
@settings(deadline=None, max_examples=60)
def test_going_on_from_any_step_at_any_world_size_gives_the_calm_run(
    kind: Callable[[], Any], world_size: int, micro: int | None, start: int, data: st.DataObject
) -> None:
    """Every batch keeps its samples, and each rank's share of them its order."""
    stop = 10
    _, calm = opened(kind, 0, 1, None)
    expected = [rows_of(batches) for batches in calm.steps(0, stop)]
    before = data.draw(st.integers(1, 3))
    state: Any = {}
    if start:
        _, first = opened(kind, 0, before, micro)
        list(first.steps(0, start))
        skeleton, tensors = flatten(first.state())
        state = unflatten(skeleton, [tensor.clone() for tensor in tensors])
    for rank in range(world_size):
        _, resumed = opened(kind, rank, world_size, micro)
        resumed.load(state)
        got = [rows_of(batches) for batches in resumed.steps(start, stop)]
        assert got == [batch[rank::world_size] for batch in expected[start:]]


@pytest.mark.parametrize(("kind", "read"), [(Plain, 32 + 10), (Telling, 10), (Shuffling, 10)])
def test_only_a_stream_that_cannot_say_where_it_stands_is_read_anew(kind: Any, read: int) -> None:
    dataset, before = opened(kind, 0, 1, None)
    list(before.steps(0, 3))
    dataset, after = opened(kind, 0, 1, None)
    after.load(before.state())
    list(after.steps(3, 4))
    assert dataset.read <= read + 5
    assert bool(before.state()) == (kind is not Plain), "saved only where it must be"


def test_every_epoch_of_a_stream_is_another_one_of_full_batches() -> None:
    _, data = opened(Telling, 0, 1, None)
    assert (data.order.n, data.order.steps_per_epoch) == (47, 4)
    rows = [rows_of(batches) for batches in data.steps(0, 9)]
    assert [row[0][:2] for row in rows] == [[step % 4 * 10, step // 4] for step in range(9)]


def test_a_stream_without_a_length_is_as_long_as_the_run() -> None:
    class Endless:
        def __iter__(self):
            return (torch.tensor([float(number)]) for number in range(10**9))

    _, data = opened(Endless, 1, 2, None, planned=30)
    assert data.order.steps_per_epoch == 30
    assert rows_of(next(data.steps(29, 30))) == [[number] for number in range(291, 300, 2)]
    with pytest.raises(ConfigError, match="--steps"):
        opened(Endless, 0, 1, None)


def test_a_stream_that_is_shorter_than_it_says_is_named() -> None:
    class Short(Telling):
        def __len__(self) -> int:
            return LENGTH + 10

    with pytest.raises(ConfigError, match="ended after 47 samples in epoch 0.*__len__"):
        list(opened(Short, 0, 1, None)[1].steps(0, 5))


@pytest.mark.parametrize("batch_size, line", [
    (10, "ended after 47 samples in epoch 0, before the end of step 5 of 30, .*; set the steps to 4, or"),
    (60, "ended after 47 samples in epoch 0, before the end of step 1 of 30, .*; use batches of at most 47 "),
])  # fmt: skip
def test_a_stream_that_ends_before_the_steps_are_done_is_named(batch_size: int, line: str) -> None:
    class Unknown(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.tensor([float(number)]) for number in range(47))

    config = DataConfig(batch_size=batch_size, micro_batch_size=None, workers=0)
    reader = BatchReader(config, 0, 0, 1, None, torch.device("cpu"))
    with pytest.raises(ConfigError, match=line):
        list(training_data(Unknown(), reader, 30).steps(0, 30))


def test_loader_processes_for_a_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match="--workers: invalid value 2"):
        opened(Plain, 0, 1, None, workers=2)


def test_reading_a_stream_moves_no_generator_and_collate_draws_the_same_after_a_resume() -> None:
    def masked(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)[:, :1] + torch.rand(())

    before = torch.get_rng_state(), random.getstate()
    calm = [rows_of(batches) for batches in opened(Plain, 0, 1, 4, collate=masked)[1].steps(0, 4)]
    late = [rows_of(batches) for batches in opened(Plain, 0, 1, 4, collate=masked)[1].steps(2, 4)]
    assert calm[2:] == late and calm[0] != calm[1]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", [Telling, Shuffling])  # each rank shuffled in another order
def test_evaluation_of_a_stream_sees_each_sample_once(kind: Callable[[], Any], world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        random.seed(rank)
        for batch in evaluation_batches(kind(), rank, world_size, 8, device=CPU):
            assert len(batch) <= 8
            seen += [int(row[0]) for row in batch]
    assert sorted(seen) == list(range(LENGTH))
