"""The copy that a save is made of: equal values in memory of its own, allocated once, tied tensors tied."""

import torch

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
