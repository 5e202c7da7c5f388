"""Seeds made from positions: the same parts give the same number on every machine and in every process.

Each part is folded in with the finaliser of splitmix64 (Steele, Lea and Flood, 2014), so that neighbouring
steps, epochs and indices give unrelated generators.
"""

import random
import sys

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


def derive_seed(*parts: int) -> int:
    """One seed, 0 <= seed < 2**63, from integers such as (seed, epoch, index)."""
    state = 0
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
    """Seed the global generators of torch (CPU, and the GPU in use), `random` and NumPy.

    Not torch.manual_seed: without a GPU in use it spends 0.1 ms on a note for CUDA's start, every time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & (1 << (64 - bits)) - 1  # int64 shifts copy the sign in; a hash wants zeros
