"""What unit tests share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from played_gpu import Notes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator["Notes"]:
    """A GPU played by the CPU while the test lasts; what was asked of it."""
    import played_gpu
    from tandem.data import loader

    loader._side_stream.cache_clear()
    mode, notes = played_gpu.play(patch=monkeypatch.setattr)
    with mode:
        yield notes
    loader._side_stream.cache_clear()
