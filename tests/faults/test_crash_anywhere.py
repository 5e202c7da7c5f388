"""A writer killed before and within every system call on its directory: nothing is lost, nothing is mixed."""

from pathlib import Path
from typing import Any

import pytest
from trial_rows import rows

from trials.system_calls import can_trace, trace

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _traceable(require: Any) -> None:
    require("ptrace", can_trace(), "this machine does not let a process trace its child")


def test_a_killed_writer_loses_and_mixes_nothing(processes: Any, tmp_path: Path) -> None:
    found = rows(processes, tmp_path, "crash", 1)
    ours = {name: row for name, row in found.items() if not name.startswith("control")}
    assert {name: row["outcome"] for name, row in ours.items() if row["bad"]} == {}
    for action in ("save", "save and prune", "save of the same step", "prune", "quarantine", "move aside"):
        assert ours[f"killed at every call: {action}"]["trials"] > 50
    dcp = found["control: torch.distributed.checkpoint into one directory"]
    assert dcp["bad"] >= 1, "or else the killer kills nobody"


def test_a_call_is_stopped_before_and_within(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def write() -> None:
        (root / "file").write_bytes(b"12345678")
        (root / "done").mkdir()

    def names(index: int, moment: Any) -> dict[str, int]:
        root.mkdir()
        assert trace(write, root, kill_at=(index, moment)).killed
        found = {path.name: path.stat().st_size for path in root.iterdir()}
        for path in root.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()
        return found

    root.mkdir()
    calls = [call.name for call in trace(write, root).calls]
    names_of = {name: calls.index(name) for name in ("openat", "write")}
    made = next(index for index, name in enumerate(calls) if name.startswith("mkdir"))
    (root / "file").unlink()
    (root / "done").rmdir()
    root.rmdir()
    assert names(names_of["openat"], "before") == {}
    assert names(names_of["openat"], "within") == {"file": 0}
    assert names(names_of["write"], "before") == {"file": 0}
    assert names(names_of["write"], "within") == {"file": 4}
    assert names(made, "before") == {"file": 8}
    assert "done" in names(made, "within")
