"""Randomness by counting: each draw's seed follows from where it happens, never from what came before.

The same parts give the same number on every machine and in every process, and a resumed run needs no saved
generator state to draw the same numbers again.
Each part is folded in with the finaliser of splitmix64 (Steele, Lea and Flood, 2014), so that neighbouring
steps, epochs and indices give unrelated generators.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import mtrand
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


MODEL, STEP = 1, 2  # what a seed is for, so that no two uses share one


def derive_seed(*parts: int, start: int = 0) -> int:
    """One seed, 0 <= seed < 2**63, from integers such as (seed, epoch, index).

    `derive_seed(c, start=derive_seed(a, b))` is `derive_seed(a, b, c)`, for many `c`.
    """
    state = start
    for part in parts:
        state ^= (part + 1) * _GOLDEN & _MASK
        state = (state ^ state >> 30) * _FIRST & _MASK
        state = (state ^ state >> 27) * _SECOND & _MASK
        state = (state ^ state >> 31) & _MASK >> 1
    return state


def derive_seeds(base: int, parts: Tensor) -> Tensor:
    """`derive_seed(..., part)` for each part of an int64 tensor, where `base` is `derive_seed(...)`."""
    state = (parts + 1) * _signed(_GOLDEN) ^ base
    state = (state ^ _shift_right(state, 30)) * _signed(_FIRST)
    state = (state ^ _shift_right(state, 27)) * _signed(_SECOND)
    return (state ^ _shift_right(state, 31)) & _MASK >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU, and the GPUs), `random` and NumPy.

    Not torch.manual_seed: without a GPU in use it spends 0.1 ms on a note for CUDA's start, every time.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
        for index, generator in enumerate(torch.cuda.default_generators):  # a model's parts on other GPUs
            if index != torch.cuda.current_device():
                generator.manual_seed(seed + index + 1)
    seed_host_generators(seed)


class HostGenerator(NamedTuple):
    """A global generator that a dataset may draw from: how it is seeded, and its next number."""

    seed: Callable[[int], object]
    draw: Callable[[], Any]

    def first(self, seed: int) -> Any:
        """The number that is next after seeding with `seed`, as the generator now is."""
        self.seed(seed)
        number = self.draw()
        self.seed(seed)
        return number


TORCH = HostGenerator(torch.default_generator.manual_seed, lambda: int(torch.randint(2**62, ())))
PYTHON = HostGenerator(random.seed, lambda: random.getrandbits(62))
NUMPY = HostGenerator(lambda seed: mtrand.seed(seed & 0xFFFFFFFF), mtrand.random_sample)


def seed_host_generators(seed: int) -> None:
    """`seed_generators` without the GPU's: what data is made with."""
    for generator in (TORCH, PYTHON, NUMPY):
        generator.seed(seed)


_for_data: numpy.random.MT19937 | None = None


@contextmanager
def kept_generators() -> Iterator[None]:
    """The host's global generators are afterwards as they were before. Not to be nested.

    NumPy takes 120 us to copy its state out and in again. It is given another generator to work with instead,
    in 0.4 us; all that gets lost is the second half of a pair of normal numbers of which one was drawn.
    """
    global _for_data
    _for_data = _for_data or numpy.random.MT19937(0)
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_generator = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_for_data)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        mtrand.set_bit_generator(numpy_generator)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & (1 << (64 - bits)) - 1  # int64 shifts copy the sign in; a hash wants zeros


def seed_model(seed: int) -> None:
    """Before the model is built: the same initial weights on every rank."""
    torch.manual_seed(derive_seed(seed, MODEL))


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Before a forward pass: dropout differs between ranks and never depends on the past."""
    seed_generators(derive_seed(seed, STEP, step, micro_step, rank))
