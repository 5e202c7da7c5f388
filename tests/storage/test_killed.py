"""A writer killed at every HTTP request, and a run killed and resumed with an empty disk."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_writer import STATE
from servers import ObjectServer

from patience import patient
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import address
from trials.store import newest_valid

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

WRITER = Path(__file__).with_name("killed_writer.py")
SOURCE = Path(__file__).parents[2] / "src"


def damaged(step: int, problem: str) -> None:
    raise AssertionError(f"step {step}: {problem}")


@pytest.mark.parametrize(
    ("server", "rule"),
    [("moto", "kill before"), ("s3rver", "kill after")],
    indirect=["server"],
    scope="module",
)
def test_a_writer_killed_at_every_request(
    server: ObjectServer, store_address: str, processes: Any, rule: str
) -> None:
    command = [sys.executable, str(WRITER), store_address, str(server.control), rule]
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(SOURCE)}
    code, output = processes.run(command, limit=300, env=environment)
    assert code == 0, output
    trials = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(trials) > 8 and not trials[-1]["killed"] and all(each["killed"] for each in trials[:-1])
    assert {each["acknowledged"] for each in trials} == {1, 2}
    for each in trials:
        store = CheckpointStore(address(f"{store_address}/{each['nth']}/checkpoints"))
        found = newest_valid(store, damaged)
        assert found is not None, each
        assert found[0] >= each["acknowledged"] and found[1] == b"%d" % found[0] + STATE, each
        store.save(3, b"3", {})
        store.prune(Retention(1))
        assert store.steps() == [3]


def losses(line: str) -> tuple[object, ...]:
    record = json.loads(line)
    return record["step"], record.get("loss"), record.get("eval")


@pytest.fixture
def small_task(tmp_path: Path) -> Iterator[Path]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
    try:
        from small_runs import TASK
    finally:
        del sys.path[0]
    (tmp_path / "small.py").write_text(TASK)
    yield tmp_path


@pytest.mark.parametrize(
    "server", ["moto", pytest.param("s3rver", marks=pytest.mark.soak)], indirect=True, scope="module"
)
def test_a_run_goes_on_from_the_store_with_an_empty_disk(
    server: ObjectServer,
    store_address: str,
    processes: Any,
    small_task: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    environment = {**kept, **server.environment, "PYTHONPATH": str(SOURCE)}

    def command(run: str, delay: float = 0.0) -> list[str]:
        flags = [
            "--task",
            "small.py:Small",
            "--batch-size",
            "24",
            "--metrics-linger",
            "0",
            "--metrics",
            "0",
        ]
        flags += ["--steps", "40", "--log-every", "5", "--checkpoint-every", "8", "--device", "cpu"]
        flags += ["--task.delay", str(delay)]
        return [sys.executable, "-m", "tandem", "launch", "--run-dir", run, *flags]

    disks = tmp_path_factory.mktemp("disks")  # short: a fork server's socket is below it, in 107 characters

    def start(run: str, disk: str, delay: float = 0.0) -> Any:
        (disks / disk).mkdir()
        where = {**environment, "TMPDIR": str(disks / disk)}
        return processes.start(command(run, delay), cwd=small_task, env=where)

    code, output = processes.wait(start("calm", "disk-0"), 200)
    assert code == 0, output
    run = f"{store_address}/run"
    killed = start(run, "disk-1", delay=0.2)
    store = CheckpointStore(address(f"{run}/checkpoints"))
    deadline = time.monotonic() + patient(200)
    while 16 not in store.steps() and killed.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    code, output = processes.wait(killed, 30)
    assert code == -signal.SIGKILL, output
    shutil.rmtree(disks / "disk-1")
    code, output = processes.wait(start(run, "disk-2", delay=0.2), 200)
    assert code == 0, output
    calm = json.loads((small_task / "calm" / "summary.json").read_text())
    summary = json.loads(store._storage.read(store.directory.parent / "summary.json"))
    assert summary["weights_sha256"] == calm["weights_sha256"]
    assert summary["resumed_from_step"] >= 16 and summary["last_checkpoint_step"] == 40
    lines = store._storage.read(store.directory.parent / "metrics.jsonl").decode().splitlines()
    wanted = (small_task / "calm" / "metrics.jsonl").read_text().splitlines()
    assert [losses(line) for line in lines] == [losses(line) for line in wanted], "the journal is whole"
    events = store._storage.read(store.directory.parent / "events.jsonl").decode()
    assert '"resumed"' in events and events.count('"world"') == 2
    for name in ("config.json", "metrics.prom"):
        assert store._storage.read(store.directory.parent / name)
    for verb, code in (("ls", 0), ("verify", 0), ("prune", 0)):
        done = processes.run([sys.executable, "-m", "tandem", "checkpoints", verb, run], env=environment)
        assert done[0] == code and "40" in done[1], done
    report = [sys.executable, "-m", "tandem", "report", run, "--output", str(small_task / "report.html")]
    assert processes.run(report, env=environment)[0] == 0
    assert "step" in (small_task / "report.html").read_text()
