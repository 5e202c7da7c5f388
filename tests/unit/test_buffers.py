"""The copy that a save is made of: equal values in memory of its own, allocated once, tied tensors tied."""

import io

import pytest
import torch

import played_gpu
from tandem.checkpoint.writer import Buffers


def test_copies_are_equal_reused_and_tied() -> None:
    tied = torch.randn(3, 4)
    state = [tied, tied.detach(), torch.randn(2), torch.empty(0), torch.empty(0, 2), torch.tensor(3)]
    buffers = Buffers()
    first = buffers.copy(state)
    assert all(torch.equal(one, other) for one, other in zip(first, state, strict=True))
    assert first[0] is first[1] and first[0].data_ptr() != tied.data_ptr()
    state[2] += 1
    second = buffers.copy(state)
    assert second[2] is first[2] and torch.equal(second[2], state[2])
    grown = buffers.copy([*state, torch.ones(1)])
    assert len(grown) == 7 and torch.equal(grown[6], torch.ones(1))


def test_a_gpus_state_has_one_pinned_piece_that_torch_can_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds each pinned tensor up to a power of two, and would not save types that share a storage."""
    mode, notes = played_gpu.play(patch=monkeypatch.setattr)
    sources = [
        torch.arange(5.0), torch.tensor([[1, 2], [3, 4]]), torch.empty(0, 3), torch.tensor(3.0),
        torch.ones(3, dtype=torch.bfloat16), torch.tensor([True]),
    ]  # fmt: skip
    buffers = Buffers()
    with mode:
        for step in range(2):
            sources[0] += step
            copies = buffers.copy(sources)
            assert all(torch.equal(*pair) for pair in zip(copies, sources, strict=True))
        assert buffers.copy(sources[:2])[1].tolist() == [[1, 2], [3, 4]]
    saved = io.BytesIO()
    torch.save(copies, saved)
    saved.seek(0)
    assert all(torch.equal(*pair) for pair in zip(torch.load(saved), copies, strict=True))
    pieces = {name: sum(notes.counts[name].values()) for name in ("pinned region", "unpinned region")}
    assert pieces == {"pinned region": 2, "unpinned region": 1}
    assert "pinned memory" not in notes.counts
    assert sum(notes.counts["wait for a stream"].values()) == 3
