"""Orders by weights and by lengths: functions of (seed, step), the same for any number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.data import sampler
from tandem.data.sampler import (
    LARGE,
    POOL_BATCHES,
    TORCH,
    BucketedOrder,
    GlobalOrder,
    TrainBatches,
    WeightedOrder,
)

SIZES = st.tuples(st.integers(1, 12), st.integers(0, 300)).map(lambda pair: (pair[0] + pair[1], pair[0]))
SEEDS = st.integers(0, 2**31)


def numbers(n: int, seed: int) -> Tensor:
    """[n] whole numbers from 0, some of them 0."""
    return torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(seed)).double()


def orders(n: int, batch_size: int, seed: int) -> list[GlobalOrder]:
    """By weights, by weights as for a large set, by lengths."""
    weights = numbers(n, seed)
    weights[seed % n] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "LARGE", 1)
        large = WeightedOrder(n, batch_size, seed, weights)
    assert large.algorithm != TORCH
    return [
        WeightedOrder(n, batch_size, seed, weights),
        large,
        BucketedOrder(n, batch_size, seed, numbers(n, seed + 1)),
    ]


@given(SIZES, SEEDS, st.integers(0, 50), st.integers(1, 5), st.none() | st.integers(1, 4))
def test_a_step_is_the_same_whenever_and_by_whomever_it_is_read(
    sizes: tuple[int, int], seed: int, step: int, ranks: int, micro: int | None
) -> None:
    n, batch_size = sizes
    ranks = min(ranks, batch_size)
    for order, again in zip(orders(n, batch_size, seed), orders(n, batch_size, seed), strict=True):
        again.batch(step + 7)  # what was read before does not matter
        epoch, batch = order.batch(step)
        assert again.batch(step)[0] == epoch and torch.equal(again.batch(step)[1], batch)
        shares = [TrainBatches(again, rank, ranks, micro, step, step + 1) for rank in range(ranks)]
        parts = [index for share in shares for _, indices, _ in share for index in indices]
        assert sorted(parts) == sorted(batch.tolist()) and len(batch) == batch_size


@given(SIZES, SEEDS, st.integers(0, 3))
def test_samples_of_no_weight_are_never_drawn(sizes: tuple[int, int], seed: int, epoch: int) -> None:
    n, batch_size = sizes
    *weighted, _ = orders(n, batch_size, seed)
    weights = numbers(n, seed)
    weights[seed % n] = 1.0
    for order in weighted:
        for step in range(order.steps_per_epoch):
            assert (weights[order.batch(epoch * order.steps_per_epoch + step)[1]] > 0).all()


@pytest.mark.parametrize("large", [1, 10**6])
def test_samples_are_drawn_by_their_weight(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(sampler, "LARGE", large)
    order = WeightedOrder(40_000, 100, 3, torch.tensor([1.0, 3.0]).double().repeat(20_000))
    drawn = torch.cat([order.batch(step)[1] for step in range(order.steps_per_epoch)])
    assert abs(float((drawn % 2).double().mean()) - 0.75) < 0.01
    later = order.batch(order.steps_per_epoch)[1]
    assert not torch.equal(later, drawn[:100]), "an epoch of its own"


def test_the_draws_of_a_large_set_are_those_of_earlier_versions() -> None:
    """A checkpoint's position refers to them: with other numbers, the algorithm needs another name."""
    order = WeightedOrder(LARGE, 4, 0, torch.arange(LARGE).double())
    assert (order.algorithm, order.batch(3)[1].tolist()) == ("splitmix64", [623243, 748999, 766110, 519369])


@given(SIZES, SEEDS, st.integers(0, 3))
def test_buckets_have_each_sample_once_and_less_padding(
    sizes: tuple[int, int], seed: int, epoch: int
) -> None:
    n, batch_size = sizes
    lengths = numbers(n, seed + 1)
    bucketed, plain = BucketedOrder(n, batch_size, seed, lengths), GlobalOrder(n, batch_size, seed)
    steps = range(epoch * plain.steps_per_epoch, (epoch + 1) * plain.steps_per_epoch)
    batches, before = ([order.batch(step)[1] for step in steps] for order in (bucketed, plain))
    assert sorted(torch.cat(batches).tolist()) == sorted(torch.cat(before).tolist())
    assert sum(lengths[batch].max() for batch in batches) <= sum(lengths[batch].max() for batch in before)


def test_batches_of_all_lengths_are_mixed() -> None:
    n = 10 * POOL_BATCHES * 4
    order = BucketedOrder(n, 10, 0, torch.arange(n).double())
    longest = [float(order.batch(step)[1].max()) for step in range(order.steps_per_epoch)]
    assert longest != sorted(longest) and longest[0] != longest[1]


def test_a_large_order_by_lengths_is_the_same_in_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(large: int) -> list[Tensor]:
        monkeypatch.setattr(sampler, "LARGE", large)
        order = BucketedOrder(999, 10, 3, numbers(999, 4))
        return [order.batch(step)[1] for step in (0, 98, 99, 250)]

    for halved, whole in zip(batches(large=999), batches(large=1000), strict=True):
        assert halved.dtype == whole.dtype == torch.int64 and torch.equal(halved, whole)
    monkeypatch.setattr(sampler, "LARGE", 999)
    assert BucketedOrder(999, 10, 3, numbers(999, 4))._permutation(0).dtype == torch.int32


def test_an_epochs_order_is_gone_before_the_next_is_drawn() -> None:
    class Watched(GlobalOrder):
        def _drawn(self, epoch: int) -> Tensor:
            assert self._cached is None
            return super()._drawn(epoch)

    order = Watched(30, 10, 0)
    assert [order.batch(step)[0] for step in (0, 3, 6)] == [0, 1, 2]
