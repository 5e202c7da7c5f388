"""The writer beside the training: what it tells of each save, and of what was read back."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tandem.checkpoint import writer as writers
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter, SaveOutcome


def save_all(store: CheckpointStore, steps: range) -> tuple[list[SaveOutcome], list[int]]:
    told, verified = list[SaveOutcome](), list[int]()
    writer = CheckpointWriter(store, Retention(2), 0, told.append, verified.append)
    for step in steps:
        writer.save(step, {"model": {"w": torch.full((3,), float(step))}}, {})
    writer.wait()
    return told, verified


def test_what_was_read_back_before_older_ones_went_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    told, verified = save_all(store, range(1, 5))
    assert [save.step for save in told] == [1, 2, 3, 4] and all(save.bytes for save in told)
    assert verified == [3, 4], "nothing had to go after the first two"
    assert store.steps() == [4, 3]


def test_a_newest_that_is_damaged_is_not_called_verified(tmp_path: Path) -> None:
    class Lying(CheckpointStore):
        def verify(self, step: int) -> None:
            state = self.path(step) / "state.pt"
            state.write_bytes(state.read_bytes()[:-1])
            super().verify(step)

    store = Lying(tmp_path)
    told, verified = save_all(store, range(1, 5))
    assert len(told) == 4 and verified == []
    assert store.steps() == [4, 3, 2, 1], "nothing is removed while the newest is not sure"


def test_a_save_waits_for_its_scores_with_the_manifest_alone(tmp_path: Path) -> None:
    store, scores = CheckpointStore(tmp_path / "checkpoints"), Future[dict[str, float]]()
    writer = CheckpointWriter(store, Retention(2), 0)
    writer.save(1, {"weight": torch.ones(3)}, lambda: {"eval": dict(scores.result())})
    assert store.steps() == []
    scores.set_result({"accuracy": 0.5})
    writer.wait()
    assert store.steps() == [1] and store.scores(1) == {"accuracy": 0.5}
    assert writer.last_step == 1


def test_a_state_that_cannot_be_rebuilt_from_its_copies_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens in the writer's thread, where an exception alone would be lost, and the save with it."""

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(writers, "unflatten", fails)
    writer = CheckpointWriter(CheckpointStore(tmp_path), Retention(2), 0)
    writer.save(1, {"weight": torch.ones(3)}, {})
    with pytest.raises(MemoryError):
        writer.wait()
    assert writer.last_step is None
