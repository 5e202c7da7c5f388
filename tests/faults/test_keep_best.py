"""The best evaluated checkpoint outlives newer ones and a restart."""

import json

import pytest
from small_runs import Runs

from tandem.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_the_best_one_stays_over_a_restart(runs: Runs) -> None:
    flags = ("--checkpoint-every", 10, "--eval-every", 20, "--checkpoint-keep", 1, "--keep-every", 70)
    best = ("--keep-best", "loss:max")  # early, so that pruning without it would take it
    runs.finish("train", "run", "--steps", 60, *flags, *best)
    runs.finish("train", "run", "--steps", 120, *flags, *best)
    folder = runs.folder / "run"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["eval"]["loss"] for line in lines if "eval" in line}
    assert set(losses) == {20, 40, 60, 80, 100, 120}
    worst = max(losses, key=lambda step: losses[step])
    store = CheckpointStore(folder / "checkpoints")
    assert worst < 120 and store.steps() == sorted({worst, 70, 120}, reverse=True)
    assert store.scores(worst)["loss"] == losses[worst] and not store.scores(70)
