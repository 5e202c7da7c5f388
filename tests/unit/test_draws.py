"""Every way to use a global generator in a sample: its numbers depend on (seed, epoch, index) alone."""

import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy
import pytest
import torch
from torch import initial_seed
from torch.utils.data import Dataset, default_collate

from tandem.data import host_generators
from tandem.data.fetch import collated
from tandem.data.host_generators import TORCH, AllNotedReads, KeptGenerators, unobserved
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.seeds import derive_seed
from tandem.errors import ConfigError

CPU = torch.device("cpu")
SEED = 7


def with_state_of_python() -> float:
    state = random.getstate()
    try:
        return random.random()
    finally:
        random.setstate(state)


def with_state_of_numpy() -> float:
    state = numpy.random.get_state()
    try:
        return numpy.random.rand()
    finally:
        numpy.random.set_state(state)


def in_a_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def from_a_shuffle() -> float:
    numbers = list(range(9))
    random.shuffle(numbers)
    return float(numbers[0])


def by_generator(seed: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


DRAWS: dict[str, Callable[[], float]] = {
    "torch.rand": lambda: torch.rand(()).item(),
    "torch.randint": lambda: float(torch.randint(100, ())),
    "torch.randn": lambda: torch.randn(()).item(),
    "random.random": random.random,
    "random.getrandbits": lambda: float(random.getrandbits(20)),
    "random.gauss": random.gauss,
    "random.shuffle": from_a_shuffle,
    "random.Random": lambda: random.Random(random.getrandbits(30)).random(),
    "numpy.rand": numpy.random.rand,
    "numpy.randn": numpy.random.randn,
    "numpy.randint": lambda: float(numpy.random.randint(100, dtype=numpy.uint8)),
    "numpy.Generator": lambda: numpy.random.default_rng(torch.initial_seed()).random(),
    "torch.Generator": lambda: by_generator(torch.initial_seed()),
    "initial_seed": lambda: by_generator(initial_seed()),
    "get_rng_state": lambda: float(torch.get_rng_state()[8:16].sum()),
    "fork_rng": in_a_fork,
    "random.getstate": with_state_of_python,
    "numpy.get_state": with_state_of_numpy,
}
METHODS: dict[str, Callable[[], float]] = {
    "Generator.initial_seed": lambda: by_generator(torch.default_generator.initial_seed()),
    "Generator.get_state": lambda: float(torch.default_generator.get_state()[8:16].sum()),
}


class Drawing(Dataset[torch.Tensor]):
    """(index, the number that `draw` returns); only samples whose index `every` divides draw."""

    def __init__(self, draw: Callable[[], float], every: int = 1) -> None:
        self.draw, self.every, self.asked = draw, every, 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        number = self.draw() if index % self.every == 0 else 0.0
        return torch.tensor([index, number], dtype=torch.float64)


class ListsDrawing(Drawing):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def rows(
    dataset: Drawing, world_size: int = 1, micro: int | None = None, workers: int = 0
) -> list[list[float]]:
    """The samples of four steps, two in each epoch."""
    made = []
    for rank in range(world_size):
        sampler = TrainBatches(GlobalOrder(23, 10, SEED), rank, world_size, micro, 0, 4)
        made += list(train_batches(dataset, sampler, seed=SEED, workers=workers, device=CPU))
    return sorted(torch.cat(made).tolist())


def defined(draw: Callable[[], float], every: int) -> list[list[float]]:
    """The definition: all three generators are seeded for each sample."""
    dataset, made = Drawing(draw, every), []
    order = GlobalOrder(23, 10, SEED)
    with KeptGenerators() as generators:
        for step in range(4):
            for index in order.batch(step)[1].tolist():
                generators.seed(derive_seed(SEED, step // 2, index))
                made.append(dataset[index].tolist())
    return sorted(made)


# A method of a generator is noted only in the first batch.
CASES = [*((name, every) for name in DRAWS for every in (1, 9)), *((name, 1) for name in METHODS)]


@pytest.mark.parametrize("kind", [Drawing, ListsDrawing])
@pytest.mark.parametrize(("name", "every"), CASES)
def test_a_sample_draws_the_same_on_any_ranks_and_micro_batches(kind: type, name: str, every: int) -> None:
    draw = {**DRAWS, **METHODS}[name]
    expected = defined(draw, every)
    assert rows(kind(draw, every)) == expected
    assert rows(kind(draw, every), 3, 2) == expected


@pytest.mark.parametrize("kind", [Drawing, ListsDrawing])
@pytest.mark.parametrize("name", ["random.gauss", "numpy.randn", "torch.randint", "initial_seed", "fork_rng"])
def test_a_sample_draws_the_same_in_workers(kind: type, name: str) -> None:
    assert rows(kind(DRAWS[name], 9), workers=2) == defined(DRAWS[name], 9)


def test_other_randomness_is_left_alone() -> None:
    """Such samples are created once, and the dataset's own generator goes on."""
    own = numpy.random.default_rng(3)
    for draw in (lambda: float(os.urandom(1)[0]), own.random, random.Random(3).random):
        dataset = Drawing(draw)
        rows(dataset)
        assert dataset.asked == 40
    after = numpy.random.default_rng(3)
    after.random(40)
    assert own.random() == after.random()


def test_states_are_restored_after_samples_of_each_kind() -> None:
    for draw in [*DRAWS.values(), *METHODS.values()]:
        random.gauss()  # leaves the second number of a pair
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        rows(Drawing(draw, 9))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert torch.random.default_generator is torch.default_generator


def test_the_state_of_random_in_memory_is_that_of_getstate() -> None:
    for _ in range(700):
        random.getrandbits(32)
        state = host_generators._state_in_memory()
        assert host_generators._as_python_has_it(state) == random.getstate()
    assert host_generators.PYTHON.state is host_generators._state_in_memory, "CPython's layout is known"


def test_tuples_of_tensors_are_collated_as_by_torch() -> None:
    samples = [(torch.rand(2, 3), torch.tensor(number)) for number in range(5)]
    for made, expected in zip(collated(None, samples, None, 0), default_collate(samples), strict=True):
        assert torch.equal(made, expected)
    assert type(collated(None, samples, None, 0)) is type(default_collate(samples))
    with pytest.raises(ConfigError, match=r"\[2, 3\]") as caught:
        collated(None, [*samples, (torch.rand(2, 3),)], None, 0)
    assert "equal size" in str(caught.value.__cause__)


def test_own_code_is_not_observed_and_a_profiler_of_the_user_stays() -> None:
    def read() -> object:
        torch.default_generator.initial_seed()
        return sys.getprofile()

    with (reads := AllNotedReads()):
        assert unobserved(read) is None
        assert not reads.seen
        read()
        assert reads.seen == {TORCH}

    def profiler(*_: object) -> None: ...

    sys.setprofile(profiler)
    try:
        assert unobserved(read) is profiler
    finally:
        sys.setprofile(None)
    with pytest.raises(ValueError), (reads := AllNotedReads()):
        unobserved(lambda: int("a number"))
    with (reads := AllNotedReads()):
        with suppress(ValueError):
            unobserved(lambda: int("a number"))
        read()
    assert reads.seen == {TORCH}
