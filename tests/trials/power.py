"""Power losses of a checkpoint store: is what it acknowledged still there, whatever the disk has kept?"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError
from trials.disk import Disk, Tree, materialize, policies
from trials.store import Row, newest_valid, rotten, save, scratch, state, store_in
from trials.system_calls import mark, trace


@dataclass
class Promise:
    """What was acknowledged up to a moment: the last step, and for each step the versions it may have."""

    step: int = 0
    versions: dict[int, set[int]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """From marks: "begin", "done" (acknowledged) or "there" (found at a start), each STEP VERSION."""
        kind, *numbers = text.split()
        if kind not in ("begin", "done", "there"):
            return
        step, version = map(int, numbers)
        self.versions.setdefault(step, set()).add(version)
        if kind != "begin":
            self.step, self.versions[step] = step, {version}

    def is_kept(self, root: Path) -> bool:
        store = store_in(root)
        newest = newest_valid(store, lambda step, problem: None)
        if newest is None:
            return self.step == 0
        wanted = [(newest[0], newest[1], newest[2])]
        if self.step and newest[0] != self.step:
            try:
                wanted.append((self.step, *store.read(self.step)))
            except CheckpointError:
                return False
        return newest[0] >= self.step and all(
            raw == state(info["version"]) and info["version"] in self.versions.get(step, ())
            for step, raw, info in wanted
        )


def _acknowledged(store: CheckpointStore, step: int, version: int, keep: int = 9) -> None:
    mark(f"begin {step} {version}")
    try:
        save(store, step, version)
    except CheckpointError:
        mark(f"failed {step} {version}")
        return
    mark(f"done {step} {version}")
    try:
        store.prune(Retention(keep))
    except CheckpointError:
        mark("not pruned")


def _steps(store: CheckpointStore) -> None:
    for step in (100, 200, 300):
        _acknowledged(store, step, 1, keep=1)


def _again(store: CheckpointStore) -> None:
    for step, version in ((100, 1), (200, 1), (200, 2), (300, 1)):
        _acknowledged(store, step, version)


def _fall_back(store: CheckpointStore) -> None:
    newest_valid(store, lambda step, problem: None)
    mark("there 200 1")
    _acknowledged(store, 300, 2, keep=1)


SESSIONS: dict[str, tuple[Callable[[CheckpointStore], object], Callable[[CheckpointStore], object]]] = {
    "three steps, keeping one": (lambda store: None, _steps),
    "a step saved again": (lambda store: None, _again),
    "fallback and a new save": (rotten, _fall_back),
}


def lose_power(
    root: Path,
    session: Callable[[], object],
    is_kept: Callable[[Path, Promise], bool],
    promise: Promise,
    shuffles: int,
) -> Counter[str]:
    """Run the session; after each call that changes something take the power, in every way of `policies`.

    Counts "kept" and "lost" promises, "different" states, and saves "acknowledged after" a failed fsync.
    """
    disk, found = Disk(root), Counter[str]()
    seen: dict[object, bool] = {}
    failed = False
    calls = trace(session, root).calls
    with scratch() as place:
        for number, call in enumerate(calls):
            if not disk.apply(call):
                continue
            if call.name == "mark":
                promise.note(call.data.decode())
                failed = failed or call.data.startswith(b"failed fsync")
                found["acknowledged after"] += failed and call.data.startswith(b"done")
            for survives in policies(number, shuffles).values():
                tree = disk.crash(survives)
                key = (_key(tree), promise.step, str(promise.versions))
                if key not in seen:
                    materialize(tree, place / "found")
                    seen[key] = is_kept(place / "found", promise)
                    shutil.rmtree(place / "found")
                found["kept" if seen[key] else "lost"] += 1
    found["different"] = len(seen)
    return found


def _key(tree: Tree | bytes) -> object:
    return tree if isinstance(tree, bytes) else frozenset((name, _key(child)) for name, child in tree.items())


Failure = tuple[int | None, bool]


def failing_fsyncs(name: str) -> list[Failure]:
    """Every fsync that the session makes, alone and with all after it."""
    prepare, act = SESSIONS[name]
    with scratch() as root:
        prepare(store_in(root))
        calls = trace(lambda: act(store_in(root)), root).calls
    count = sum(call.name == "fsync" for call in calls)
    return [(index, forever) for index in range(count) for forever in (False, True)]


def lose_power_in(name: str, shuffles: int, failures: Sequence[Failure] = ((None, False),)) -> Row:
    """One of SESSIONS, once for each of `failures`: the fsync that fails and whether all after it do."""
    prepare, act = SESSIONS[name]
    found: Counter[str] = Counter()
    for index, forever in failures:
        with scratch() as root:
            prepare(store_in(root))
            promise = Promise(versions={100: {1}, 200: {1}} if prepare is rotten else {})

            def session(index: int | None = index, forever: bool = forever, root: Path = root) -> None:
                if index is not None:
                    fail_fsync(root, index, forever)
                act(store_in(root))

            one = lose_power(root, session, lambda path, kept: kept.is_kept(path), promise, shuffles)
            found += one
            found["lied"] += one["acknowledged after"] if forever else 0
    trials, bad = found["kept"] + found["lost"], found["lost"] + found["lied"]
    outcome = f"{found['lost']} lost of {found['different']} different states"
    outcome += (
        f", {found['lied']} acknowledged while every fsync failed" if failures[0][0] is not None else ""
    )
    what = (
        "power loss" if failures[0][0] is None else f"EIO at each of {len(failures) // 2} fsyncs, power loss"
    )
    return Row(f"{what}: {name}", trials, bad, outcome)


def fail_fsync(root: Path, index: int, forever: bool) -> None:
    """From now on in this process the `index`-th os.fsync below `root` fails, or all from it on."""
    real, count, root = os.fsync, 0, root.resolve()

    def fsync(descriptor: int) -> None:
        nonlocal count
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(root):
            mine, count = count, count + 1
            if mine == index or (forever and mine > index):
                mark(f"failed fsync {path.relative_to(root)}")
                raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
