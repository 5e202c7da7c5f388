"""The permutation that is computed: a bijection of any size, forward and back, as random as torch's."""

import math
import tracemalloc
from collections.abc import Callable

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.sampler import BLOCK, FEISTEL, GlobalOrder, Numbers, Permutation
from tandem.data.seeds import derive_seed

KEYS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 3_000), KEYS)
def test_every_number_comes_exactly_once_and_the_inverse_finds_its_place(n: int, key: int) -> None:
    permutation, places = Permutation(n, key), numpy.arange(n)
    numbers = permutation.at(places)
    assert numbers.dtype == numpy.int64 and sorted(numbers) == list(range(n))
    assert (permutation.inverse(numbers) == places).all()


@given(st.integers(1, 10**12), KEYS, st.data())
def test_any_place_of_up_to_a_trillion_is_found_and_found_back(n: int, key: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, n - 1), max_size=50, unique=True))
    places = numpy.array(asked, dtype=numpy.int64)
    permutation = Permutation(n, key)
    numbers = permutation.at(places)
    assert len(set(numbers.tolist())) == len(places) and all(0 <= number < n for number in numbers)
    assert (permutation.inverse(numbers) == places).all()
    assert (permutation.at(permutation.inverse(places)) == places).all()
    alone = [int(Permutation(n, key).at(numpy.array([place]))[0]) for place in places]
    assert alone == numbers.tolist(), "a place has its number whatever else is asked"


def test_blocks_and_shapes_change_nothing() -> None:
    permutation, places = Permutation(10**9, 7), numpy.arange(2 * BLOCK + 5)
    parts = [permutation.at(places[start : start + 1000]) for start in range(0, len(places), 1000)]
    assert (permutation.at(places) == numpy.concatenate(parts)).all()
    square = places[:64].reshape(8, 8)
    assert (permutation.at(square) == permutation.at(places[:64]).reshape(8, 8)).all()


@pytest.mark.parametrize("outside", [-1, 10])
def test_a_place_outside_is_refused(outside: int) -> None:
    for ask in (Permutation(10, 0).at, Permutation(10, 0).inverse):
        with pytest.raises(IndexError):
            ask(numpy.array([3, outside]))


def test_the_numbers_are_those_of_earlier_versions() -> None:
    """A checkpoint's position refers to them: with other numbers, the algorithm needs another name."""
    assert FEISTEL == "feistel"
    assert Permutation(10**6, 0).at(numpy.arange(5)).tolist() == [894248, 329645, 350597, 732168, 521064]
    far = Permutation(10**12, 3).at(numpy.arange(3))
    assert far.tolist() == [665721235189, 254654427340, 849153189885]


def computed(n: int, key: int) -> Numbers:
    return Permutation(n, derive_seed(key)).at(numpy.arange(n))


def drawn(n: int, key: int) -> Numbers:
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(key))).numpy()


BOTH = pytest.mark.parametrize("shuffle", [computed, drawn])


def deviation(counts: Numbers, expected: float, freedom: int) -> float:
    """A chi-square statistic as a number of standard deviations, from a fixed set of keys."""
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


@BOTH
@pytest.mark.parametrize("n", [100, 317])
def test_numbers_and_differences_of_neighbors_are_even_over_many_epochs(
    shuffle: Callable[[int, int], Numbers], n: int
) -> None:
    orders = numpy.stack([shuffle(n, key) for key in range(2_000)])
    cells = numpy.bincount((numpy.arange(n) * n + orders).reshape(-1), minlength=n * n)
    assert abs(deviation(cells, len(orders) / n, (n - 1) ** 2)) < 4
    steps = numpy.bincount(((orders[:, 1:] - orders[:, :-1]) % n).reshape(-1), minlength=n)[1:]
    assert abs(deviation(steps, len(orders), n - 2)) < 4
    fixed = (orders == numpy.arange(n)).sum()
    assert abs(fixed - len(orders)) < 4 * math.sqrt(len(orders))


@BOTH
@pytest.mark.parametrize("n", [2**20, 2**20 + 1])  # no number leaves the range; almost half of them do
def test_one_epoch_of_a_large_set_has_no_serial_correlation(
    shuffle: Callable[[int, int], Numbers], n: int
) -> None:
    order = shuffle(n, 1)
    centered = (order - order.mean()) / order.std()
    for lag in (1, 2, 3, 64, 1024):
        assert abs((centered[lag:] * centered[:-lag]).mean() * math.sqrt(n)) < 4, lag
    pairs = (order[1::2][: n // 2] * 32 // n) * 32 + order[::2][: n // 2] * 32 // n
    counts = numpy.bincount(pairs, minlength=1024)
    assert abs(deviation(counts, len(pairs) / 1024, 1023)) < 4
    first = numpy.bincount(order[: n // 100] * 100 // n, minlength=100)
    assert abs(deviation(first, (n // 100) / 100, 99)) < 4


@pytest.mark.parametrize(("batch_size", "places"), [(256, slice(None)), (32_768, slice(5, None, 1024))])
def test_an_order_of_a_billion_samples_takes_less_than_a_megabyte(batch_size: int, places: slice) -> None:
    GlobalOrder(10**9, batch_size, 0).indices(0, places)  # what NumPy imports at its first use
    tracemalloc.start()
    try:
        order = GlobalOrder(10**9, batch_size, 0)
        for step in (0, 1, 10**5, 3 * order.steps_per_epoch - 1):
            order.indices(step, places)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**20
