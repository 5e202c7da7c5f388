"""The power goes at every moment of a session: the last acknowledged step loads, whatever the disk kept."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trial_rows import TRIALS, rows

from tandem.checkpoint.storage import folder
from trials.disk import Disk, Survives, materialize, policies
from trials.power import lose_power_in
from trials.system_calls import can_trace, mark, trace

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _traceable(require: Any) -> None:
    require("ptrace", can_trace(), "this machine does not let a process trace its child")


def test_the_last_acknowledged_step_loads(processes: Any, tmp_path: Path) -> None:
    found = rows(processes, tmp_path, "power", TRIALS)
    ours = {name: row for name, row in found.items() if not name.startswith("control")}
    assert {name: row["outcome"] for name, row in ours.items() if row["bad"]} == {}
    assert sum("EIO at each of" in name for name in ours) == sum("power loss: " in name for name in ours) // 2
    for name in ("control: written in place", "control: temporary file, then os.replace, no fsync"):
        assert found[name]["bad"] > 0, "or else the disk forgets nothing"


def no_file_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "fsync", lambda descriptor: None)


def no_directory_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "fsync_directory", lambda path: None)


def no_names_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "make_directory", lambda path: os.makedirs(path, exist_ok=True))


@pytest.mark.parametrize("leave_out", [no_file_fsync, no_directory_fsync, no_names_above])
def test_a_store_that_leaves_one_out_is_caught(
    leave_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch)
    assert lose_power_in("three steps, keeping one", 1).bad > 0


def test_a_store_that_fsyncs_the_same_file_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError:
            os.fsync(descriptor)

    monkeypatch.setattr(folder, "fsync", again)
    assert lose_power_in("three steps, keeping one", 1, failures=[(5, False), (6, False)]).bad > 0


def test_what_the_modelled_disk_keeps(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"old")

    def session() -> None:
        descriptor = os.open(root / "new", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"new")
        os.fsync(descriptor)
        mark("synced")
        os.write(descriptor, b"more")
        os.rename(root / "old", root / "moved")
        above = os.open(root, os.O_RDONLY)
        os.fsync(above)
        mark("named")
        os.unlink(root / "moved")

    disk, trees = Disk(root), {}
    for call in trace(session, root).calls:
        disk.apply(call)
        trees[call.data if call.name == "mark" else call.name] = {
            name: disk.crash(survives) for name, survives in policies(0, 3).items()
        }
    assert trees[b"synced"]["dropped"] == {"old": b"old"}, "the file's name is not on disk yet"
    assert trees[b"synced"]["everything"] == {"old": b"old", "new": b"new"}
    assert trees[b"named"]["dropped"] == {"moved": b"old", "new": b"new"}
    assert trees[b"named"]["names with zeroes"] == {"moved": b"old", "new": b"new\0\0\0\0"}
    last = trees["unlink"]
    assert last["names without data"] == {"new": b"new"} and last["data without names"]["moved"] == b"old"
    materialize(last["everything"], tmp_path / "found")
    assert (tmp_path / "found" / "new").read_bytes() == b"newmore"


def test_a_failed_fsync_gives_the_pages_up(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"")

    def session() -> None:
        descriptor = os.open(root / "file", os.O_WRONLY)
        os.write(descriptor, b"lost")
        mark("failed fsync file")
        os.write(descriptor, b"kept")
        os.fsync(descriptor)

    disk = Disk(root)
    for call in trace(session, root).calls:
        disk.apply(call)
    nothing = Survives(lambda: False, lambda: "dropped", random.Random(0))
    assert disk.crash(nothing) == {"file": b"\0\0\0\0kept"}
