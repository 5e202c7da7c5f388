"""Randomness by counting: each draw's seed follows from where it happens, never from what came before.

A resumed run therefore needs no saved generator state to draw the same numbers again.
"""

import torch

from tandem.data.seeds import derive_seed, seed_generators

MODEL, STEP = 1, 2  # what a seed is for, so that no two uses share one


def seed_model(seed: int) -> None:
    """Before the model is built: the same initial weights on every rank."""
    torch.manual_seed(derive_seed(seed, MODEL))


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Before a forward pass: dropout differs between ranks and never depends on the past."""
    seed_generators(derive_seed(seed, STEP, step, micro_step, rank))
