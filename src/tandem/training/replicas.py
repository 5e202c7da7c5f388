"""Are the replicas still the same? One number per rank, compared when an evaluation is due anyway."""

import logging

import torch
from torch import Tensor, nn

from tandem.cluster.world import World

log = logging.getLogger("tandem.run")

MODULUS = 2**52  # float64 holds such numbers exactly
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(model: nn.Module) -> int:
    """A number below 2**52 that depends on every bit of the parameters. One synchronisation on GPUs."""
    total = torch.zeros((), dtype=torch.int64)
    for number, parameter in enumerate(model.parameters(), 1):
        total = total.to(parameter.device) * 31 + number * _bits(parameter.detach()).sum(dtype=torch.int64)
    return int(total) % MODULUS


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(WORDS[real.element_size()])


def differing_replicas(world: World, model: nn.Module) -> list[int]:
    """Ranks whose parameters are not rank 0's, bit for bit. All ranks call it together."""
    sums = [int(row[0]) for row in world.gather([float(checksum(model))])]
    different = [rank for rank, each in enumerate(sums) if each != sums[0]]
    if different and world.is_first:
        log.error("the parameters of ranks %s are not those of rank 0", ", ".join(map(str, different)))
    return different
