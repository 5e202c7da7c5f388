"""Counter-based randomness: a seed depends on where a number is drawn, never on earlier draws.

The same parts give the same number on every machine and in every process, so a resumed run draws the same
numbers again without saved generator states. Each part is mixed in with the finalizer of splitmix64 (Steele,
Lea and Flood, 2014), so that adjacent steps, epochs and indices give unrelated generators.
"""

import torch
from torch import Tensor

from tandem.data.host_generators import HOST_GENERATORS

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


MODEL = 1  # the purpose of a seed, so that no two uses share a seed
STEP = 2
DATA = 3


def derive_seed(*parts: int, start: int = 0) -> int:
    """Derive one seed, 0 <= seed < 2**63, from integers such as (seed, epoch, index).

    For many values of c, `derive_seed(c, start=derive_seed(a, b))` equals `derive_seed(a, b, c)`.
    """
    state = start
    for part in parts:
        # Without the + 1, a part of 0 would mix in nothing.
        state ^= (part + 1) * GOLDEN & _MASK
        state = (state ^ state >> 30) * FIRST & _MASK
        state = (state ^ state >> 27) * SECOND & _MASK
        state = (state ^ state >> 31) & _MASK >> 1
    return state


def derive_seeds(base: int, parts: Tensor) -> Tensor:
    """Return `derive_seed(..., part)` for each part of an int64 tensor; `base` is `derive_seed(...)`."""
    state = (parts + 1) * _signed(GOLDEN) ^ base
    state = (state ^ _shift_right(state, 30)) * _signed(FIRST)
    state = (state ^ _shift_right(state, 27)) * _signed(SECOND)
    return (state ^ _shift_right(state, 31)) & _MASK >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU and GPUs), `random` and NumPy.

    It avoids torch.manual_seed, which spends 0.1 ms on a deferred call for CUDA while no GPU is in use.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
        for index, generator in enumerate(torch.cuda.default_generators):  # for a model's parts on other GPUs
            if index != torch.cuda.current_device():
                generator.manual_seed(seed + index + 1)
    seed_host_generators(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the generators of the CPU, which data loading uses, as `seed_generators` does."""
    for generator in HOST_GENERATORS:
        generator.seed(seed)


def _signed(value: int) -> int:
    # torch computes with int64, which wraps around to the same bits as an unsigned integer.
    return value - 2**64 if value >= 2**63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    # Int64 shifts copy the sign bit in, but the hash needs zeros.
    return (state >> bits) & (1 << (64 - bits)) - 1


def seed_model(seed: int) -> None:
    """Seed before the model is built: the same initial weights on every rank."""
    torch.manual_seed(derive_seed(seed, MODEL))
    seed_host_generators(derive_seed(seed, MODEL))


def seed_datasets(seed: int) -> None:
    """Seed before the datasets are built: the same random split on every rank and after every start."""
    seed_host_generators(derive_seed(seed, DATA))


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed before a forward pass: dropout differs between ranks and does not depend on the past."""
    seed_generators(derive_seed(seed, STEP, step, micro_step, rank))
