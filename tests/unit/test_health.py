import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from patience import patient
from tandem import layout
from tandem.telemetry import health

NOW = 1000.0
GOOD = {"time": NOW - 1, "state": "training", "step": 5, "last_progress": NOW - 10, "limit_seconds": 60.0,
        "pid": os.getpid()}  # fmt: skip


@pytest.mark.parametrize(("change", "healthy", "text"), [
    ({}, True, "training at step 5"),
    ({"last_progress": NOW - 61}, False, "no progress for 1 min 1 s, limit 1 min"),
    ({"last_progress": NOW - 61, "limit_seconds": None}, True, "last progress 1 min 1 s ago"),
    ({"time": NOW - 20}, False, "last heartbeat 20 s ago"),
    ({"time": NOW + 50, "last_progress": NOW + 50}, True, "last progress 0 s ago"),
    ({"pid": 2**22 + 5}, False, "is gone"),
    ({"pid": 0}, False, "is gone"),
    ({"state": "failed"}, False, "failed"),
    ({"state": "succeeded", "time": 0}, True, "succeeded"),
])  # fmt: skip
def test_judge(change: dict[str, object], healthy: bool, text: str) -> None:
    verdict, line = health.assess(GOOD | change, NOW)
    assert verdict is healthy and text in line and "\n" not in line


def test_what_is_written_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"TANDEM_STATE_DIR": str(tmp_path)}
    assert health.main(environ) == 1
    health.write_health(tmp_path, health.record("training", 3, 0, 9))
    assert health.main(environ) == 0
    for bad in ("", "[]", "{}", "5", '{"time": "x"}', "[" * 50_000, '{"state":"a","step":NaN}'):
        (tmp_path / "health.json").write_text(bad)
        assert health.main(environ) == 1
    assert health.main({}) == 1
    output = capsys.readouterr()
    assert output.out.count("\n") == 10 and output.err == ""


def test_a_heartbeat_of_another_machine_is_judged_by_its_age() -> None:
    elsewhere = GOOD | {"pid": 2**22 + 5, "machine": "another boot 1"}
    assert health.assess(elsewhere, NOW)[0]
    assert not health.assess(elsewhere, NOW + 20)[0]


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_a_clock_that_is_set_changes_no_verdict_on_this_machine(ahead: float) -> None:
    """A healthy run looked dead after a step forward; after a step back, no hang was seen for as long."""
    good, quiet = health.record("train", 3, 5, 60), health.record("train", 3, 61, 60)
    healthy, line = health.assess(good, time.time() + ahead)
    assert healthy and "last progress 5" in line
    assert "no progress for 1 min 1 s" in health.assess(quiet, time.time() + ahead)[1]
    lost = {**good, "monotonic": time.monotonic() - 20}
    assert "last heartbeat 20 s ago" in health.assess(lost, time.time() + ahead)[1]


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_a_run_on_a_machine_with_another_clock_is_alive_while_its_heartbeat_changes(
    tmp_path: Path, ahead: float
) -> None:
    (tmp_path / "config.json").write_text("{}")
    elsewhere = {**health.record("train", 3, 5, 60), "machine": "another boot 1"}
    beats = iter(range(100))

    def beat() -> None:
        now = time.time() + ahead + next(beats)
        health.write_run_health(tmp_path, {**elsewhere, "time": now, "last_progress": now - 5})

    beat()
    later = threading.Timer(0.1, beat)
    later.start()
    healthy, line = health.check_run(tmp_path, 20)
    assert healthy and "last progress 5" in line
    later.join()
    healthy, line = health.check_run(tmp_path, 0.1)
    assert not healthy and "heartbeat" in line


def test_a_copy_of_a_run_is_not_healthy_because_the_run_is(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    (run / "config.json").write_text("{}")
    health.write_run_health(run, health.record("train", 3, 0, 9))
    shutil.copytree(run, copy)
    assert health.check_run(run)[0]
    assert not health.check_run(copy)[0] and "is a copy" in health.check_run(copy)[1]
    record = json.loads((run / "health.json").read_text())
    record["folder"][1] += 1  # some network file systems give a directory another inode
    (run / "health.json").write_text(json.dumps(record))
    assert health.check_run(run)[0]
    health.write_run_health(run, health.record("train", 3, 0, 9))
    run.rename(tmp_path / "renamed")
    assert health.check_run(tmp_path / "renamed")[0]


def test_a_run_directory_is_judged_by_its_summary_else_by_its_heartbeat(tmp_path: Path) -> None:
    assert health.check_run(tmp_path / "no")[1].count("does not exist") == 1
    assert "no config.json" in health.check_run(tmp_path)[1]
    (tmp_path / "config.json").write_text("{}")
    assert health.check_run(tmp_path)[1].startswith("no heartbeat")
    health.write_run_health(tmp_path, health.record("train", 3, 0, 9))
    assert health.check_run(tmp_path)[0]
    (tmp_path / "summary.json").write_text('{"state": "failed", "global_step": 1200}')
    assert health.check_run(tmp_path) == (False, "failed at step 1,200")
    (tmp_path / "summary.json").write_text('{"state": "finished"}')
    assert health.check_run(tmp_path)[0]
    assert sorted(os.listdir(tmp_path)) == ["config.json", "health.json", "summary.json"]


def test_the_heartbeat_of_a_run_on_an_object_store_is_in_its_local_directory(tmp_path: Path) -> None:
    folder = tmp_path / f"tandem-runs-{os.getuid()}" / "bucket" / "run"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    health.write_run_health(folder, health.record("train", 3, 0, 9))
    command = [sys.executable, "-m", "tandem", "health", "s3://bucket/run"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "") and "train at step 3" in done.stdout, done


def test_no_link_in_a_run_directory_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in (layout.HEALTH, layout.HEALTH_TEMPORARY):
        (tmp_path / name).symlink_to("mine")
    health.write_run_health(tmp_path, health.record("train", 3, 0, 9))
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / layout.HEALTH).is_symlink()


def test_it_imports_little() -> None:
    heavy = "{'torch', 'prometheus_client', 'logging'}"
    code = f"import sys, tandem.telemetry.health; print(len({heavy} & set(sys.modules)))"
    source = os.path.join(os.path.dirname(health.__file__), "..", "..")
    command = [sys.executable, "-S", "-c", code]
    own = {"PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(20), env=own)
    assert done.stdout == "0\n", done.stderr
