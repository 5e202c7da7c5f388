"""Checkpoint files: what is written, found damaged, set aside and pruned. Kills and power: tests/faults."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tandem.checkpoint.decision import locate
from tandem.checkpoint.listing import list_checkpoints, rule_of, table
from tandem.checkpoint.retention import Best, Retention
from tandem.checkpoint.storage import folder
from tandem.checkpoint.storage.protocol import Sink
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError
from trials.store import newest_valid

INFO = {"epoch": 2, "eval": {"accuracy": 0.97}, "task": "digits"}
STATE = bytes(range(256)) * 64


def no_corruption(step: int, problem: str) -> None:
    raise AssertionError(f"step {step}: {problem}")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def names(store: CheckpointStore) -> list[str]:
    return sorted(os.listdir(store.directory))


def test_what_was_saved_is_read_back(store: CheckpointStore) -> None:
    assert store.steps() == [] and newest_valid(store, no_corruption) is None
    size = store.save(500, STATE, INFO)
    store.save(1000, lambda sink: (sink.write(b"in "), sink.write(b"parts")), INFO)
    assert size == store.sizes()[500]
    assert store.steps() == [1000, 500]
    assert newest_valid(store, no_corruption) == (1000, b"in parts", INFO)
    assert store.read(500) == (STATE, INFO) and store.info(500) == INFO
    assert names(store) == ["step-000000500", "step-000001000"]
    assert sorted(os.listdir(store.directory / "step-000000500")) == ["manifest.json", "state.pt"]
    entry = json.loads((store.path(500) / "manifest.json").read_text())["files"]["state.pt"]
    assert entry["bytes"] == len(STATE) and len(entry["sha256"]) == 64


def test_info_that_json_changes_still_verifies(store: CheckpointStore) -> None:
    odd = {"path": Path("a/b"), "tuple": (1, 2), "lr": 1e-05, "nan": float("nan"), "by": {10: 1, 2: 2}}
    store.save(1, b"x", odd)
    store.verify(1)
    assert store.info(1)["by"] == {"10": 1, "2": 2} and store.info(1)["tuple"] == [1, 2]


def test_a_directory_without_manifest_does_not_count(store: CheckpointStore) -> None:
    store.save(1, STATE, INFO)
    (store.directory / "step-000000002").mkdir()
    (store.directory / "step-000000002" / "state.pt").write_bytes(STATE)
    (store.directory / "step-3").mkdir()
    assert store.steps() == [1]


def test_the_store_needs_no_torch() -> None:
    code = "import sys, tandem.checkpoint.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_bytes_are_on_disk_before_the_name(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        calls.append("rename")
        real_rename(source, target)

    store.save(1, STATE, INFO)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store.save(2, STATE, INFO)
    assert calls == ["fsync state.pt", "fsync manifest.json", "fsync .tmp", "rename", "fsync checkpoints"]


def flip(raw: bytes, bit: int) -> bytes:
    bit %= len(raw) * 8
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ (1 << bit % 8)]) + raw[bit // 8 + 1 :]


def zero_page(raw: bytes, place: int) -> bytes:
    start = place % len(raw) // 4096 * 4096
    return raw[:start] + bytes(len(raw[start : start + 4096])) + raw[start + 4096 :]


def truncate(raw: bytes, place: int) -> bytes:
    return raw[: place % len(raw)]


def extend(raw: bytes, place: int) -> bytes:
    return raw + bytes(1 + place % 4096)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["state.pt", "manifest.json"]),
    damage=st.sampled_from([flip, zero_page, truncate, extend]),
    place=st.integers(0, 1 << 30),
)
def test_any_damage_is_found_and_the_older_one_is_used(
    tmp_path_factory: pytest.TempPathFactory, name: str, damage: Callable[[bytes, int], bytes], place: int
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("damage"))
    store.save(1, b"good", INFO)
    store.save(2, STATE, INFO)
    path = store.path(2)
    raw = (path / name).read_bytes()
    (path / name).write_bytes(damage(raw, place))
    with pytest.raises(CorruptCheckpointError):
        store.verify(2)
    with pytest.raises(CorruptCheckpointError):
        store.read(2)
    told: list[int] = []
    assert newest_valid(store, lambda step, problem: told.append(step)) == (1, b"good", INFO)
    assert told == [2] and names(store) == ["corrupt-step-000000002-1", "step-000000001"]


def test_every_bit_of_the_manifest_counts(store: CheckpointStore) -> None:
    store.save(2, STATE, {"lr": 1e-05, "name": "é"})
    path = store.path(2) / "manifest.json"
    raw = path.read_bytes()
    for bit in random.Random(0).sample(range(len(raw) * 8), 800):
        path.write_bytes(flip(raw, bit))
        with pytest.raises(CorruptCheckpointError):
            store.verify(2)


def test_missing_and_swapped_files_are_damage(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(step, b"state %d" % step, INFO)
    (store.path(3) / "state.pt").unlink()
    (store.path(2) / "state.pt").write_bytes(b"state 1")
    told: list[str] = []
    newest = newest_valid(store, lambda step, problem: told.append(problem))
    assert newest is not None and newest[0] == 1
    assert "is missing" in told[0] and "SHA-256" in told[1]
    os.rename(store.path(1), store.path(9))
    with pytest.raises(CorruptCheckpointError, match="step 1, its directory for step 9"):
        store.verify(9)


def test_quarantine_finds_a_free_name(store: CheckpointStore) -> None:
    for _ in range(2):
        store.save(5, STATE, INFO)
        (store.path(5) / "state.pt").write_bytes(b"")
        assert newest_valid(store, lambda step, problem: None) is None
    assert names(store) == ["corrupt-step-000000005-1", "corrupt-step-000000005-2"]


def test_an_unreadable_volume_is_no_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        store.save(step, STATE, INFO)

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        newest_valid(store, no_corruption)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert store.steps() == [2, 1]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(1, b"first", INFO)
    store.save(1, b"second", INFO)
    assert newest_valid(store, no_corruption) == (1, b"second", INFO)
    assert names(store) == ["step-000000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_failing_volume(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int, call: str, step: int
) -> None:
    for old in (1, 2):
        store.save(old, b"old %d" % old, INFO)

    real = os.open

    def fail(*args: Any, **kwargs: Any) -> int:
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError) as caught:
            store.save(step, STATE, INFO)
    message = str(caught.value)
    assert str(store.directory) in message and os.strerror(number) in message and "\n" not in message
    assert names(store) == ["step-000000001", "step-000000002"]
    assert newest_valid(store, no_corruption) == (2, b"old 2", INFO)


def test_a_full_volume_inside_torch_save(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def payload(sink: Sink) -> None:
        try:
            sink.write(STATE)
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None  # as torch.save does

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(1, payload, INFO)
    assert names(store) == []


def test_short_writes_are_continued(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:1000]))
    store.save(1, STATE, INFO)
    store.verify(1)


@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("step", [1, 2])
def test_after_an_fsync_error_everything_is_written_anew(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, nth: int, step: int
) -> None:
    store.save(1, b"old", INFO)
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(seen) == nth + 1:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.save(step, STATE, INFO)
    new = [path for path in seen if ".tmp-" in path]
    assert len(new) == len(set(new))  # no file was fsynced twice
    assert newest_valid(store, no_corruption) == (step, STATE, INFO)
    assert names(store) == [f"step-{number:09d}" for number in sorted({1, step})]


def test_a_file_system_that_cannot_fsync_directories(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.save(1, STATE, INFO)
    store.verify(1)


def test_a_rename_that_worked_but_says_stale(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "rename", rename)
    for _ in range(2):
        store.save(1, STATE, INFO)
    assert newest_valid(store, no_corruption) == (1, STATE, INFO)


class StaleFile:
    """An open file whose handle goes stale in the middle: NFS says so at a read, not at the open."""

    def __init__(self, file: Any, state: dict[str, int]) -> None:
        self._file, self._state, self.size = file, state, file.size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(1000 if size < 0 or self._state["left"] else size)
        if self._state["left"]:
            self._state["left"] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return data + (self._file.read() if size < 0 else b"")

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("times, works", [(1, True), (2, True), (9, False)])
def test_a_handle_that_goes_stale_in_a_read(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, times: int, works: bool
) -> None:
    store.save(1, STATE, INFO)
    state = {"left": 0}
    real = folder._File
    monkeypatch.setattr(folder, "_File", lambda descriptor, size: StaleFile(real(descriptor, size), state))
    for read in (store.read, store.verify, store.info):
        state["left"] = times
        if works:
            read(1)
        else:
            with pytest.raises(CheckpointError, match="Stale file handle"):
                read(1)
    assert store.steps() == [1] and not store.quarantined()


def test_the_best_survives_a_restart(store: CheckpointStore) -> None:
    rule = Retention(2, Best("accuracy", True))
    for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.9, 0.8, 0.6, 0.6]):
        store.save(step, STATE, {"eval": {"accuracy": accuracy, "note": "text"}})
        CheckpointStore(store.directory).prune(rule)
    assert store.steps() == [6, 5, 3]
    store.save(3, STATE, {"eval": {"accuracy": 0.1}})  # another evaluation of it: nothing stale is remembered
    assert list(store.why_kept(rule)) == [6, 5]
    (store.path(5) / "manifest.json").write_bytes(b"damaged")
    assert dict(CheckpointStore(store.directory).scores(5)) == {}


def test_prune_keeps_the_newest_and_the_milestones(store: CheckpointStore) -> None:
    for step in range(1, 7):
        store.save(step, STATE, INFO)
    assert store.prune(Retention(2, every=3), dry_run=True) == [1, 2, 4] and len(store.steps()) == 6
    assert store.prune(Retention(2, every=3)) == [1, 2, 4]
    assert store.steps() == [6, 5, 3]
    assert store.prune(Retention(0)) == [3, 5] and store.prune(Retention(1)) == []
    assert store.steps() == [6]


def test_nothing_is_pruned_while_the_newest_is_damaged(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(step, STATE, INFO)
    (store.path(3) / "state.pt").write_bytes(flip(STATE, 77))
    with pytest.raises(CorruptCheckpointError):
        store.prune(Retention(1))
    assert store.steps() == [3, 2, 1]


def test_readers_beside_a_writer_see_only_whole_checkpoints(store: CheckpointStore) -> None:
    store.save(0, STATE, INFO)
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            wrong.extend(step for step in store.steps() if not (store.path(step) / "state.pt").exists())

    reader = threading.Thread(target=look)
    reader.start()
    for step in range(1, 30):
        store.save(step, STATE, INFO)
    stop.set()
    reader.join()
    assert wrong == []


def test_a_listing_finds_the_newer_one_of_a_writer_that_prunes_meanwhile(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that had the names found the only one gone, and took the folder for an empty one."""
    store.save(1, STATE, INFO)
    scandir = os.scandir

    def late(path: Any) -> Any:
        monkeypatch.setattr(os, "scandir", scandir)
        store.save(2, STATE, INFO)
        store.prune(Retention(1))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert store.steps() == [2]


def test_a_name_that_is_told_for_ever_and_is_not_there_ends_no_listing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, which remembers a directory for up to a minute."""
    store.save(1, STATE, INFO)
    names = [*os.listdir(store.directory), "step-000000000"]
    monkeypatch.setattr(os, "listdir", lambda path: names)
    assert store.steps() == [1]


def test_list_checkpoints(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, STATE, INFO)
    (store.path(1) / "state.pt").write_bytes(b"")
    written = store.manifest(2)["written_at"]
    rows = list_checkpoints(store, now=written + 60)
    assert [(row.step, row.verified) for row in rows] == [(2, None), (1, None)]
    assert rows[0].age_seconds == pytest.approx(60) and rows[0].bytes == store.sizes()[2]
    rows = list_checkpoints(store, verify=True)
    assert [row.verified for row in rows] == [True, False] and "bytes" in rows[1].problem
    assert list_checkpoints(CheckpointStore(store.directory / "missing")) == [] and store.steps() == [2, 1]


def test_the_rule_is_the_runs_own_unless_said_otherwise(store: CheckpointStore) -> None:
    assert rule_of(store) == Retention(3)
    own = {"checkpoint_keep": 2, "keep_best": "loss", "keep_every": 10}
    for step in (1, 2):
        store.save(step, STATE, {"settings": own, "eval": {"loss": step}})
    (store.path(2) / "manifest.json").write_bytes(b"damaged")
    assert rule_of(store) == Retention(2, Best("loss", False), 10)
    assert rule_of(store, newest=7, every=5) == Retention(7, Best("loss", False), 5)


def test_the_table(store: CheckpointStore) -> None:
    assert table([], store) == f"no checkpoints in {store.directory}"
    for step in (1, 2, 3):
        store.save(step, STATE, {"eval": {"accuracy": 1 / step}})
    (store.path(2) / "state.pt").write_bytes(b"")
    store.save(4, STATE, {})
    (store.path(4) / "state.pt").write_bytes(b"")
    newest_valid(store, lambda step, problem: None)
    rows = list_checkpoints(store, verify=True, rule=Retention(1, Best("accuracy", True)))
    lines = table(rows, store).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["step", "3", "2", "1"]
    assert "verified  newest" in lines[1] and "accuracy 0.3333" in lines[1]
    assert "DAMAGED   next to delete" in lines[2] and "best accuracy:max" in lines[3]
    assert "0 bytes" in lines[4] and lines[5].endswith(": corrupt-step-000000004-1")


def test_what_is_pruned_while_somebody_looks_is_no_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        store.save(step, STATE, INFO)
    real = CheckpointStore.manifest

    def pruned_first(self: CheckpointStore, step: int) -> dict[str, Any]:
        if step == 1:
            CheckpointStore(store.directory).prune(Retention(1))
        return real(self, step)

    monkeypatch.setattr(CheckpointStore, "manifest", pruned_first)
    assert [row.step for row in list_checkpoints(store, verify=True)] == [2]


def test_locate(store: CheckpointStore) -> None:
    for step in (100, 200):
        store.save(step, STATE, INFO)
    run = store.directory.parent
    for path in (run, store.directory):
        for text, step in ((str(path), None), (f"{path}@100", 100)):
            found, at = locate(text)
            assert (found.directory, at) == (store.directory, step)
    found, at = locate(f"{store.path(200)}")
    assert (found.directory, at) == (store.directory, 200)
    wrong = {f"{run}@150": "200, 100", f"{run}/no": "not a directory", str(run.parent): "no checkpoint"}
    for text, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            locate(text)


def test_move_aside_loses_nothing(store: CheckpointStore) -> None:
    assert store.move_aside() is None
    for step in (1, 2, 3):
        store.save(step, STATE, INFO)
    newer = store.move_aside(after_step=2)
    assert newer is not None and newer.parent == store.directory.parent and store.steps() == [2, 1]
    assert newest_valid(CheckpointStore(newer), no_corruption) == (3, STATE, INFO)
    rest = store.move_aside()
    assert rest is not None and rest != newer and rest.name.startswith("checkpoints-before-")
    assert CheckpointStore(rest).steps() == [2, 1] and store.steps() == []


def test_a_step_whose_manifest_is_gone_is_named(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, STATE, INFO)
    (store.path(2) / "manifest.json").unlink()
    for verify in (False, True):
        rows = list_checkpoints(store, verify)
        assert [(row.step, row.verified) for row in rows] == [(2, False), (1, True if verify else None)]
        assert "step 2: its manifest is missing" in table(rows, store)
        assert rows[0].bytes == (store.path(2) / "state.pt").stat().st_size, "it takes room, too"
    skipped: list[int] = []
    assert newest_valid(store, lambda step, _: skipped.append(step)) == (1, STATE, INFO)
    assert skipped == [2]
