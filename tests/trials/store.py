"""A checkpoint store under trial: what its writers do, and what a reader may find after that."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoint.retention import Best, Retention
from tandem.checkpoint.storage.protocol import Sink
from tandem.checkpoint.store import CheckpointStore, OnCorrupt
from tandem.errors import CheckpointError


def newest_valid(
    store: CheckpointStore, on_corrupt: OnCorrupt
) -> tuple[int, bytes, dict[str, Any]] | None:
    """(step, state, info) of the newest valid checkpoint; damaged ones are quarantined."""
    found = store.newest(store.read, on_corrupt)
    return None if found is None else (found[0], *found[1])


@dataclass(frozen=True)
class Row:
    """One line of the table. `bad` of `trials` ended as they must not; the same of the control, if any."""

    name: str
    trials: int
    bad: int
    outcome: str
    control: str = ""
    control_trials: int = 0
    control_bad: int = 0

    @property
    def ratio(self) -> float | None:
        """Share of good ends, ours over the control's; None without a control or where it had none."""
        good = self.control_trials - self.control_bad
        if not self.trials or good <= 0:
            return None
        return (1 - self.bad / self.trials) / (good / self.control_trials)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: neither a kill nor the modelled disk needs a real one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as directory:
        yield Path(directory)


def state(version: int) -> bytes:
    """Three pages and a bit, in which every word says whose they are."""
    return b"%08d" % version * 1600


def save(store: CheckpointStore, step: int, version: int, score: float = 0.0) -> None:
    """In pieces, as torch.save writes."""
    raw = state(version)

    def pieces(sink: Sink) -> None:
        for start in range(0, len(raw), 5000):
            sink.write(raw[start : start + 5000])

    store.save(step, pieces, {"version": version, "eval": {"accuracy": score}})


def store_in(root: Path) -> CheckpointStore:
    return CheckpointStore(root / "run" / "checkpoints")


@dataclass(frozen=True)
class Scenario:
    """What a writer does, what lies there before, and what a reader may find when it was killed at it."""

    prepare: Callable[[CheckpointStore], object]
    act: Callable[[CheckpointStore], object]
    newest: tuple[tuple[int, int] | None, ...]  # allowed (step, version); the last one when it was not killed
    whole: frozenset[int]  # steps that are there and whole, whenever it was killed
    damaged: frozenset[int] = frozenset()  # steps that `prepare` has damaged
    tidy: bool = True  # done to its end it leaves nothing hidden, whatever was killed before


def _five(store: CheckpointStore) -> None:
    for step, score in zip((100, 200, 300, 400, 500), (0.1, 0.9, 0.2, 0.3, 0.4), strict=True):
        save(store, step, 1, score)
    dead = store.directory / ".tmp-pruned-50-dead"  # another prune was killed half-way
    dead.mkdir()
    (dead / "state.pt").write_bytes(b"half")


def _two(store: CheckpointStore) -> None:
    save(store, 100, 1)
    save(store, 200, 1)
    dead = store.directory / ".tmp-step-000000300-1-dead"  # another writer was killed half-way
    dead.mkdir()
    (dead / "state.pt").write_bytes(b"half")


def rotten(store: CheckpointStore) -> None:
    _two(store)
    save(store, 300, 1)
    file = store.path(300) / "state.pt"
    file.write_bytes(b"\1" + file.read_bytes()[1:])


KEEP = Retention(2, Best("accuracy", True), 400)  # of `_five`: 500 and 400, and 200 for its score


def _save_and_prune(store: CheckpointStore) -> None:
    save(store, 600, 1, 0.5)
    store.prune(KEEP)


def _fall_back_and_save(store: CheckpointStore) -> None:
    newest_valid(store, lambda step, problem: None)
    save(store, 300, 2)


SCENARIOS: dict[str, Scenario] = {
    "first save": Scenario(
        lambda store: None, lambda store: save(store, 100, 1), (None, (100, 1)), frozenset()
    ),
    "save": Scenario(_two, lambda store: save(store, 300, 1), ((200, 1), (300, 1)), frozenset({100, 200})),
    "save and prune": Scenario(_five, _save_and_prune, ((500, 1), (600, 1)), frozenset({200, 400, 500})),
    "save of the same step": Scenario(
        _two, lambda store: save(store, 200, 2), ((200, 1), (200, 2)), frozenset({100, 200})
    ),
    "prune": Scenario(_five, lambda store: store.prune(Retention(1)), ((500, 1), (500, 1)), frozenset({500})),
    "quarantine": Scenario(
        rotten,
        lambda store: newest_valid(store, lambda step, problem: None),
        ((200, 1), (200, 1)),
        frozenset({100, 200}),
        frozenset({300}),
        tidy=False,
    ),
    "quarantine, then save": Scenario(
        rotten, _fall_back_and_save, ((200, 1), (300, 2)), frozenset({100, 200}), frozenset({300})
    ),
    "move aside": Scenario(
        _five,
        lambda store: store.move_aside(after_step=200),
        ((500, 1), (400, 1), (300, 1), (200, 1)),
        frozenset({100, 200, 300, 400, 500}),
        tidy=False,
    ),
}


def judge(root: Path, scenario: Scenario) -> str:
    """What a reader finds: "old", "new", "lost", "mixed" or "false alarm"."""
    store, told = store_in(root), []
    newest = newest_valid(store, lambda step, problem: told.append(step))
    if set(told) - scenario.damaged:
        return "false alarm"
    if newest is not None and newest[1] != state(newest[2]["version"]):
        return "mixed"
    found = None if newest is None else (newest[0], int(newest[2]["version"]))
    if found not in scenario.newest:
        return "lost"
    places = [store, *(CheckpointStore(path) for path in store.directory.parent.glob("checkpoints-before-*"))]
    for step in scenario.whole:
        holding = [place for place in places if step in place.steps()]
        if len(holding) != 1 or not _is_whole(holding[0], step):
            return "lost"
    return "new" if found == scenario.newest[-1] else "old"


def _is_whole(store: CheckpointStore, step: int) -> bool:
    try:
        raw, info = store.read(step)
    except CheckpointError:
        return False
    return raw == state(info["version"])
