"""Randomness by counting: each draw's seed follows from where it happens, never from what came before.

A resumed run therefore needs no saved generator state to draw the same numbers again.
"""

import random

import torch

_MASK = (1 << 63) - 1


def derive(*parts: int) -> int:
    """A 63-bit seed from integers (SplitMix64 finaliser over each part in turn; Steele et al., 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def seed_model(seed: int) -> None:
    """Before the model is built: the same initial weights on every rank."""
    random.seed(seed)
    torch.manual_seed(derive(seed, 0))


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Before a forward pass: dropout differs between ranks and never depends on the past."""
    torch.manual_seed(derive(seed, 1, step, micro_step, rank))
