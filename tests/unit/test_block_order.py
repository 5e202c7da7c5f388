"""The order of data in blocks: a bijection, the same for any number of ranks, from few blocks at a time."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.slices import DataConfig
from tandem.data.block_order import AHEAD, LANES, WINDOW, BlockOrder, lanes_of
from tandem.data.blocks import BlockSource
from tandem.data.fingerprint import data_facts, reordered
from tandem.data.kinds import training_data
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.source import BatchReader
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.build import order_of

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=120)
BATCHES = st.integers(1, 90)
SEEDS = st.integers(0, 2**31)


class Stored:
    """Samples in blocks; counts what is announced."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.announced: list[int] = []
        self.held: list[int] = []

    def block_sizes(self) -> list[int]:
        return self.sizes

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> int:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)

    def will_need(self, blocks: Sequence[int]) -> None:
        self.announced.extend(blocks)

    def hold(self, blocks: int, processes: int) -> None:
        self.held = [blocks, processes]


def reader(rank: int, world_size: int, micro: int | None = None, workers: int = 0, batch: int = 96) -> Any:
    config = DataConfig(batch_size=batch, micro_batch_size=micro, workers=workers)
    return BatchReader(config, 7, rank, world_size, None, CPU)


def blocks_of(sizes: Sequence[int]) -> Any:
    """[n] the block of each sample."""
    return numpy.repeat(numpy.arange(len(sizes)), sizes)


@given(SIZES, BATCHES, SEEDS, st.integers(0, 3))
def test_an_epoch_has_every_sample_once_except_an_incomplete_batch(
    sizes: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    n = sum(sizes)
    batch_size = min(batch_size, n)
    order = BlockOrder(n, batch_size, seed, sizes)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    seen = torch.cat([order.batch(step)[1] for step in steps]).tolist()
    assert len(set(seen)) == len(seen) == n // batch_size * batch_size
    assert 0 <= min(seen) and max(seen) < n


@given(SIZES, BATCHES, SEEDS, st.integers(0, 500), st.integers(1, 6), st.sampled_from([None, 1, 7]))
def test_ranks_share_the_batch_of_any_step_and_need_only_the_announced_blocks(
    sizes: list[int], batch_size: int, seed: int, step: int, ranks: int, micro: int | None
) -> None:
    n = sum(sizes)
    batch_size = min(batch_size, n)
    ranks = min(ranks, batch_size)
    order = BlockOrder(n, batch_size, seed, sizes)
    again = BlockOrder(n, batch_size, seed, sizes)
    again.batch(step + 11)  # what was read before does not matter
    of_sample = blocks_of(sizes)
    found = []
    for rank in range(ranks):
        share = TrainBatches(again, rank, ranks, micro, step, step + 2)
        read = list(share)
        found += [index for _, indices, at in read if at == step for index in indices]
        needed = set(again.blocks(step, step + 2, share.positions))
        assert {int(of_sample[index]) for _, indices, _ in read for index in indices} <= needed
    assert found == order.batch(step)[1].tolist()


@pytest.mark.parametrize(
    "batch_size, blocks, lanes", [(256, 1000, 64), (96, 1000, 48), (67, 1000, 1), (256, 20, 16), (60, 7, 6)]
)
def test_lanes_divide_the_batch(batch_size: int, blocks: int, lanes: int) -> None:
    assert lanes_of(batch_size, blocks) == lanes


def test_a_node_reads_each_block_once_and_few_at_a_time() -> None:
    sizes = [10] * 4096
    order = BlockOrder(sum(sizes), 256, 0, sizes)
    read = 0
    for rank in range(16):
        positions = TrainBatches(order, rank, 16, None, 0, 1).positions
        assert order.open_blocks(positions) == LANES // 16 * (WINDOW + 1)
        read += len(order.blocks(0, order.steps_per_epoch, positions))
        assert len(order.blocks(3, 4, positions)) <= 2 * LANES // 16 * WINDOW
    # Only blocks at the ends of lanes are in two.
    assert 4096 <= read <= 4096 + LANES


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_nodes_that_divide_the_lanes_read_little_twice_even_of_few_uneven_blocks(nodes: int) -> None:
    sizes = numpy.random.default_rng(0).integers(50, 150, 200)
    order = BlockOrder(int(sizes.sum()), 256, 0, sizes)
    shares = (TrainBatches(order, rank, nodes, None, 0, 1).positions for rank in range(nodes))
    read = [sizes[order.blocks(0, order.steps_per_epoch, positions)].sum() for positions in shares]
    assert sum(read) <= 1.15 * sizes.sum()


def test_the_order_is_the_one_of_earlier_versions() -> None:
    """A checkpoint's position refers to it: with another order, the algorithm needs another name."""
    sizes = [3, 1, 7, 20, 5, 5, 11] * 30
    order = BlockOrder(sum(sizes), 12, 3, sizes)
    numbers = torch.cat([order.batch(step)[1] for step in (0, 1, 500)]).tolist()
    assert (order.algorithm, order.lanes) == ("blocks", 12)
    assert numbers[:12] == [1404, 1463, 1223, 1084, 727, 783, 697, 877, 1193, 1166, 768, 103]
    assert hashlib.sha256(str(numbers).encode()).hexdigest()[:12] == "8584d0441420"


def test_far_steps_and_many_blocks_take_no_more_memory_than_the_blocks() -> None:
    order = BlockOrder(10**12, 256, 0, numpy.full(10**6, 10**6))
    epoch, indices = order.batch(10**10)
    assert epoch == 10**10 // order.steps_per_epoch and len(set(indices.tolist())) == 256


def test_windows_are_mixed_as_by_randperm() -> None:
    """Positions and differences of neighbors in the smallest windows, over many epochs."""
    sizes = [4] * WINDOW  # one lane, one window
    counts = numpy.zeros((16, 16))
    differences = numpy.zeros(16)
    for epoch in range(4000):
        order = BlockOrder(16, 1, epoch, sizes)
        places = numpy.array([int(order.batch(step)[1]) for step in range(16)])
        counts[numpy.arange(16), places] += 1
        differences += numpy.bincount((places[1:] - places[:-1]) % 16, minlength=16)
    # 225 and 14 degrees of freedom: five standard deviations
    assert ((counts - 250) ** 2 / 250).sum() < 240 + 5 * (2 * 240) ** 0.5
    expected = differences[1:].mean()
    assert ((differences[1:] - expected) ** 2 / expected).sum() < 15 + 5 * 30**0.5


@pytest.mark.parametrize("micro", [None, 5, 16])
@pytest.mark.parametrize("workers", [0, 2])
def test_global_batches_are_the_same_in_every_form(micro: int | None, workers: int) -> None:
    """For 1, 2, 3, 4 and 6 ranks; with 2 loader processes only for 1 and 3, which costs less."""
    rng = random.Random(5)
    sizes = [rng.randint(1, 30) for _ in range(100)]

    def batches(world_size: int, workers: int, micro: int | None) -> list[list[int]]:
        shares = [
            list(training_data(Stored(sizes), reader(rank, world_size, micro, workers), None).steps(3, 9))
            for rank in range(world_size)
        ]
        return [
            [int(index) for share in shares for part in share[step] for index in part] for step in range(6)
        ]

    wanted = batches(1, 0, None)
    for world_size in (1, 2, 3, 4, 6) if not workers else (1, 3):
        assert batches(world_size, workers, micro) == wanted


def test_an_epoch_continues_on_other_ranks_with_every_sample_once() -> None:
    rng = random.Random(6)
    sizes = [rng.randint(1, 30) for _ in range(150)]
    steps = sum(sizes) // 96
    seen = []
    for world_size, start, stop in ((2, 0, 5), (3, 5, 11), (1, 11, steps)):
        for rank in range(world_size):
            data = training_data(Stored(sizes), reader(rank, world_size), None)
            seen += [int(index) for step in data.steps(start, stop) for part in step for index in part]
    assert len(seen) == len(set(seen)) == steps * 96


@pytest.mark.parametrize("workers", [0, 2])
def test_blocks_are_announced_before_they_are_read(workers: int) -> None:
    source = Stored([12] * 400)
    assert isinstance(source, BlockSource)
    data = training_data(source, reader(1, 3, workers=workers), None)
    assert source.held == [16 * (WINDOW + 1), max(1, workers)]
    steps = data.steps(0, data.order.steps_per_epoch)
    for step in range(data.order.steps_per_epoch):
        (batch,) = next(steps)
        assert {int(index) // 12 for index in batch} <= set(source.announced)
        if step == 0:
            first = len(source.announced)
    assert 0 < first <= len(source.announced) < 400 / 3 + 16 + 1
    assert data.order.steps_per_epoch < 2 * AHEAD


def test_what_follows_is_announced_in_time() -> None:
    source = Stored([5] * 3000)
    order = BlockOrder(len(source), 50, 7, source.sizes)
    data = training_data(source, reader(0, 2, batch=50), None)
    for step, _ in enumerate(data.steps(0, 400)):
        until = min(400, step + AHEAD)
        assert set(order.blocks(step, until, slice(0, 25))) <= set(source.announced)
    assert len(source.announced) < 2 * len(source.sizes)


def test_other_blocks_than_the_checkpoints_show() -> None:
    sizes = [5, 5, 6, 4]
    same = Stored(sizes)
    facts = data_facts(same, BlockOrder(20, 4, 0, sizes))
    assert facts["order"] == "blocks" and facts["order_of"].startswith("4:")
    assert not reordered(facts, data_facts(same, BlockOrder(20, 4, 1, sizes)))
    assert reordered(facts, data_facts(same, BlockOrder(20, 4, 0, [5, 5, 4, 6])))
    assert reordered(facts, data_facts(same, GlobalOrder(20, 4, 0)))
    assert reordered(data_facts(same, GlobalOrder(20, 4, 0)), facts)


class Declaring:
    """A task that declares blocks of a plain dataset."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def build_model(self) -> Any: ...

    def build_datasets(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...

    def sample_blocks(self, train: Any) -> Any:
        return self.sizes


class Both(Declaring):
    def sample_weights(self, train: Any) -> Any:
        return [1.0] * len(train)


class Weighted:
    build_model = build_datasets = loss = Declaring.build_model

    def sample_weights(self, train: Any) -> Any:
        return [1.0] * len(train)


class PerRank(Stored):
    def of_rank(self, rank: int, world_size: int) -> Any:
        return iter(())


class Streamed:
    def block_sizes(self) -> list[int]:
        return [5]

    def __iter__(self) -> Any:
        return iter(range(5))


def test_a_task_declares_blocks_of_any_dataset() -> None:
    made = order_of(TaskWithDefaults(Declaring([4, 6])), range(10))
    assert isinstance(made(10, 5, 0), BlockOrder)
    # The task's blocks count, not those of the dataset.
    declared = order_of(TaskWithDefaults(Declaring([100])), range(100))
    data = training_data(Stored([5] * 20), reader(0, 1, batch=5), None, declared)
    assert isinstance(data.order, BlockOrder) and data.order.lanes == 1


@pytest.mark.parametrize(
    "task, train, words",
    [
        (Declaring([4, 7]), range(10), "11 samples in all"),
        (Declaring([4, 0, 6]), range(10), "block of 0"),
        (Declaring([4.0, 6.0]), range(10), "type list"),
        (Declaring(None), range(10), "NoneType"),
        (Declaring([5]), Streamed(), "__len__"),
        (Declaring([5]), PerRank([5]), "__len__"),
        (Both([10]), range(10), "sample_blocks"),
        (Weighted(), Stored([10]), "block_sizes"),
    ],
)
def test_blocks_that_cannot_be_ordered_are_one_line(task: Any, train: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        order_of(TaskWithDefaults(task), train)
    assert "\n" not in str(raised.value) and "test_block_order.py line" in str(raised.value)


@pytest.mark.parametrize("train", [PerRank([5]), Streamed()])
def test_blocks_of_data_with_its_own_order_are_refused(train: Any) -> None:
    with pytest.raises(ConfigError, match="block_sizes"):
        training_data(train, reader(0, 1, batch=5), 3)


def test_sizes_that_do_not_fit_the_dataset_are_refused() -> None:
    class Wrong(Stored):
        def __len__(self) -> int:
            return 11

    with pytest.raises(ConfigError, match="11"):
        training_data(Wrong([5, 5]), reader(0, 1, batch=5), None)
