"""Which errors are a lack of memory, and what the agents read of it in their store."""

import json
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tandem.distributed.restart_notes import KEYS, OutOfMemory, is_out_of_memory, newest_in, write

SHORT = [
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1\nLast error:\nCuda failure 2 'out of memory'"),
    torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
]
OTHER = [RuntimeError("my own buffer is out of memory"), ValueError("CUDA out of memory"), MemoryError()]


def test_a_failed_allocation_of_the_installed_torch_is_one() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("error", SHORT)
def test_it_is_one_by_its_type_or_words_and_as_a_cause(error: Exception) -> None:
    outer = ValueError("the loss failed")
    outer.__cause__ = error
    assert is_out_of_memory(error) and is_out_of_memory(outer)


@pytest.mark.parametrize("error", OTHER)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_agents_read_what_a_rank_has_written_below_its_prefix() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert newest_in(store) is None
    found = OutOfMemory("generation/1.ab", 1, 0, 7, 4)
    write(PrefixStore("generation/1.ab", store), found)
    assert newest_in(store) == found


@pytest.mark.parametrize(
    "changed",
    [{"fits": 7}, {"fits": 0}, {"fits": -1}, {"fits": "4"}, {"rank": None}, {"prefix": 3}, "junk", [], None],
)
def test_anything_else_there_counts_as_nothing(changed: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = vars(OutOfMemory("generation/1.ab", 1, 0, 7, 4))
    store.set(KEYS[OutOfMemory], json.dumps(whole | changed if isinstance(changed, dict) else changed))
    assert newest_in(store) is None
