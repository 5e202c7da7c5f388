"""The order of samples: each once an epoch, the same for any number of ranks, seekable."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.data import sampler
from tandem.data.batch_shares import equal_shares, slice_of
from tandem.data.sampler import FEISTEL, LARGE, TORCH, GlobalOrder, TrainBatches
from tandem.data.seeds import derive_seed, derive_seeds
from tandem.errors import ConfigError

seeds = st.integers(0, 2**63 - 1)


def made(n: int, batch_size: int, seed: int, algorithm: str) -> GlobalOrder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "LARGE", 1 if algorithm == FEISTEL else LARGE)
        return GlobalOrder(n, batch_size, seed)


@st.composite
def orders(draw: st.DrawFn) -> GlobalOrder:
    n = draw(st.integers(1, 200))
    return made(n, draw(st.integers(1, n)), draw(seeds), draw(st.sampled_from([TORCH, FEISTEL])))


def steps_of(order, rank, world_size, micro_batch_size, start, stop):
    """Per step, the list of this rank's micro-batches, each a list of (epoch, index)."""
    batches = TrainBatches(order, rank, world_size, micro_batch_size, start, stop)
    flat = iter([[(epoch, index) for index in indices] for epoch, indices, _ in batches])
    steps = [[next(flat) for _ in range(batches.micro_steps(step))] for step in range(start, stop)]
    assert next(flat, None) is None
    return steps


@given(orders(), st.integers(0, 5))
def test_an_epoch_has_every_sample_at_most_once_in_full_batches(order: GlobalOrder, epoch: int) -> None:
    assert order.steps_per_epoch == order.n // order.batch_size
    seen: list[int] = []
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        of_epoch, batch = order.batch(step)
        assert of_epoch == epoch and batch.dtype == torch.int64 and len(batch) == order.batch_size
        seen += batch.tolist()
    assert len(set(seen)) == len(seen) == order.steps_per_epoch * order.batch_size
    assert set(seen) <= set(range(order.n))


@given(orders(), st.data())
def test_the_union_of_all_ranks_is_the_global_batch(order: GlobalOrder, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, min(6, order.batch_size)))
    micro = data.draw(st.none() | st.integers(1, 40))
    step = data.draw(st.integers(0, 3 * order.steps_per_epoch))
    epoch, batch = order.batch(step)
    ranks = [steps_of(order, rank, world_size, micro, step, step + 1)[0] for rank in range(world_size)]
    seen = sorted(key for micro_batches in ranks for keys in micro_batches for key in keys)
    assert seen == sorted((epoch, index) for index in batch.tolist())


@given(orders(), st.data())
def test_micro_batches_match_over_ranks_and_are_never_empty(order: GlobalOrder, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, min(6, order.batch_size)))
    micro = data.draw(st.none() | st.integers(1, 40))
    samplers = [TrainBatches(order, rank, world_size, micro, 0, 2) for rank in range(world_size)]
    assert len({each.micro_steps(0) for each in samplers}) == 1
    for each in samplers:
        sizes = [len(indices) for _, indices, _ in each]
        assert sizes == each.micro_sizes(0) + each.micro_sizes(1) and len(sizes) == len(each)
        assert min(sizes) >= 1 and sum(each.micro_sizes(0)) == each.share_size
        if micro is not None:
            uneven = order.batch_size % world_size != 0
            assert max(sizes) <= micro + (1 if micro == 1 and uneven else 0)


@given(st.integers(1, 300), st.integers(1, 17))
def test_shares_differ_by_at_most_one(n: int, world_size: int) -> None:
    world_size = min(n, world_size)
    sizes = equal_shares(n, world_size)
    parts = [torch.arange(n)[slice_of(sizes, rank)] for rank in range(world_size)]
    assert parts[0].tolist() == list(range(0, n, world_size))  # as in runs before there were shares
    assert [len(part) for part in parts] == list(sizes) and max(sizes) - min(sizes) <= 1
    assert sorted(torch.cat(parts).tolist()) == list(range(n))


@given(orders(), st.data())
def test_seeking_gives_what_iterating_gives(order: GlobalOrder, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, min(3 * order.steps_per_epoch, 40)))
    start = data.draw(st.integers(0, stop))
    fresh = made(order.n, order.batch_size, order.seed, order.algorithm)
    assert steps_of(fresh, 0, 1, None, start, stop) == steps_of(order, 0, 1, None, 0, stop)[start:]


@given(orders(), st.data())
def test_a_share_is_a_part_of_the_batch_whatever_was_read_before(
    order: GlobalOrder, data: st.DataObject
) -> None:
    for _ in range(4):
        step = data.draw(st.integers(0, 3 * order.steps_per_epoch))
        first = data.draw(st.integers(0, order.batch_size - 1))
        part = slice(first, data.draw(st.integers(first + 1, order.batch_size)), data.draw(st.integers(1, 5)))
        epoch, batch = made(order.n, order.batch_size, order.seed, order.algorithm).batch(step)
        of_epoch, share = order.indices(step, part)
        assert of_epoch == epoch and share.tolist() == batch[part].tolist() and share.dtype == torch.int64


@pytest.mark.parametrize("algorithm", [TORCH, FEISTEL])
def test_epochs_and_seeds_are_shuffled_differently(algorithm: str) -> None:
    order = made(100, 100, 0, algorithm)
    assert order.batch(0)[1].tolist() != order.batch(1)[1].tolist()
    assert order.batch(0)[1].tolist() != made(100, 100, 1, algorithm).batch(0)[1].tolist()


def test_the_order_is_the_one_of_earlier_versions() -> None:
    """A resume across versions continues in the same order: change these numbers knowingly."""
    assert GlobalOrder(10, 10, seed=0).batch(0)[1].tolist() == [6, 3, 5, 2, 7, 4, 1, 0, 9, 8]
    assert GlobalOrder(LARGE, 4, seed=0).batch(0)[1].tolist() == [713528, 300433, 867655, 777626]
    assert GlobalOrder(LARGE - 1, 4, seed=0).algorithm == TORCH
    assert derive_seed(0, 1, 2) == 475751613658851134


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    GlobalOrder(100, 10, seed=0).batch(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("n", "batch_size"), [(100, 240), (10, 0), (1, 2)])
def test_a_batch_that_cannot_be_filled_is_a_config_error(n: int, batch_size: int) -> None:
    with pytest.raises(ConfigError, match="--batch-size") as caught:
        GlobalOrder(n, batch_size, 0)
    assert "\n" not in str(caught.value)


def test_no_samples_are_no_matter_of_the_batch() -> None:
    with pytest.raises(ConfigError, match="training set has no samples") as caught:
        GlobalOrder(0, 1, 0)
    assert "--batch-size" not in str(caught.value)


def test_too_many_ranks_and_a_micro_batch_of_none_are_config_errors() -> None:
    order = GlobalOrder(10, 2, 0)
    with pytest.raises(ConfigError, match="--batch-size 3"):
        TrainBatches(order, 0, 3, None, 0, 1)
    with pytest.raises(ConfigError, match="--micro-batch-size"):
        TrainBatches(order, 0, 1, 0, 0, 1)


@given(seeds, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_seeds_of_a_tensor_are_those_of_its_parts(seed: int, parts: list[int]) -> None:
    base = derive_seed(seed, 3)
    expected = [derive_seed(seed, 3, part) for part in parts]
    assert derive_seeds(base, torch.tensor(parts)).tolist() == expected
    assert all(0 <= value < 2**63 for value in expected)


def test_neighbouring_positions_have_different_seeds() -> None:
    assert len({derive_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}) == 8_000
