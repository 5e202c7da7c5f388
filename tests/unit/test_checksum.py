"""The checksum behind the comparison of replicas: what it sees, and what is compared."""

import pytest
import torch
from torch import nn

from tandem.distributed import batchnorm as ours
from tandem.training.rank_checks import checksum, comparable


@pytest.mark.parametrize("size", [1, 3, 8, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_flipped_bit_shows(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.rand(size, generator=generator).mul(2).to(dtype)
    right = int(checksum(tensor))
    raw = tensor.view(torch.uint8)
    bits = 1 if dtype == torch.bool else 8
    for byte in torch.randint(len(raw), (50,), generator=generator).tolist():
        for bit in range(bits):
            raw[byte] ^= 1 << bit
            assert int(checksum(tensor)) != right, (byte, bit)
            raw[byte] ^= 1 << bit
    assert int(checksum(tensor)) == right


def test_places_count() -> None:
    tensor = torch.arange(10_000.0, dtype=torch.float64)
    seen = {int(checksum(tensor))}
    for i, j in [(0, 1), (0, 1024), (1, 1025), (5, 9_999), (9_998, 9_999), (100, 3_172)]:
        swapped = tensor.clone()
        swapped[i], swapped[j] = tensor[j], tensor[i]
        seen.add(int(checksum(swapped)))
    assert len(seen) == 7
    assert int(checksum(torch.zeros(4))) == int(checksum(torch.zeros(9)))


def test_views_that_are_not_aligned_or_contiguous() -> None:
    whole = torch.rand(7, 5)
    assert int(checksum(whole[1:, 1:])) == int(checksum(whole[1:, 1:].clone()))
    flat = torch.rand(11)
    assert int(checksum(flat[1:])) == int(checksum(flat[1:].clone()))


def test_statistics_count_only_where_they_are_synchronized() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert set(comparable(model)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert statistics <= set(comparable(synchronized))
    assert statistics <= set(comparable(ours.synchronized(model)))
