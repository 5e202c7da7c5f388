"""Alerts that fire for real and resolve: a two-node run is broken on purpose, under a real Prometheus.

The rules are the real ones with seconds in place of minutes (monitoring/shorten.py).
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from prometheus import ROOT, RULES, TASK, Prometheus, fetch, pid_of_rank, until

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(400)]
LIMIT = 120.0


def short_rules() -> str:
    spec = importlib.util.spec_from_file_location("shorten", ROOT / "monitoring" / "shorten.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.shortened(RULES.read_text()))


class Broken:
    """An endless run with knobs, and the Prometheus that watches it."""

    def __init__(self, folder: Path, processes: Any, ports: list[int]) -> None:
        (folder / "slow.py").write_text(TASK)
        self.knobs = folder / "knobs"
        self.knobs.mkdir()
        self.folder = folder
        target = f"127.0.0.1:{ports[2]}"
        self.prometheus = Prometheus(processes, folder / "prometheus", ports[3], target, "1s", short_rules())
        flags: dict[str, object] = {
            "nodes": 2, "task": "slow.py:Slow", "task.delay": 0.02, "task.knobs": self.knobs,
            "task.slow-by": 3, "run-dir": "run", "batch-size": 24, "steps": 100000, "log-every": 10,
            "eval-every": "never", "checkpoint-every": 200, "metrics": ports[2], "metrics-linger": 600,
        }  # fmt: skip
        command = [sys.executable, "-m", "tandem", "launch"]
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
        with (folder / "log").open("w") as log:
            self.run = processes.start(command, cwd=folder, env=environment, stdout=log)
        until(lambda: self.has_saved(f"http://{target}/metrics"), "checkpoint", 180)

    def has_saved(self, page: str) -> bool:
        assert self.run.poll() is None, (self.folder / "log").read_text()
        return b"tandem_checkpoint_size_bytes" in fetch(page)

    def rank(self, rank: int) -> int:
        return int(until(lambda: pid_of_rank(rank, self.run.pid), f"rank {rank}"))

    def fires(self, alert: str) -> None:
        try:
            until(lambda: alert in self.prometheus.firing(), f"{alert} firing", LIMIT)
        except AssertionError as error:
            log = (self.folder / "log").read_text()
            raise AssertionError(f"{error}\n{log[-4000:]}") from error

    def resolves(self, alert: str) -> None:
        until(lambda: alert not in self.prometheus.firing(), f"{alert} resolved", LIMIT)


@pytest.fixture(scope="module")
def broken(
    tmp_path_factory: pytest.TempPathFactory, module_processes: Any, module_ports: list[int], require: Any
) -> Broken:
    require("prometheus")
    return Broken(tmp_path_factory.mktemp("alerts"), module_processes, module_ports)


def test_a_straggler(broken: Broken) -> None:
    (broken.knobs / "slow").touch()
    broken.fires("TandemStraggler")
    alert = next(
        each
        for each in broken.prometheus.ask("alerts")["alerts"]
        if each["labels"]["alertname"] == "TandemStraggler"
    )
    assert "Rank 1 on node 1 of" in alert["annotations"]["description"]
    (broken.knobs / "slow").unlink()
    broken.resolves("TandemStraggler")


def test_training_that_stands_still(broken: Broken) -> None:
    pid = broken.rank(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        broken.fires("TandemTrainingStalled")
    finally:
        os.kill(pid, signal.SIGCONT)
    broken.resolves("TandemTrainingStalled")


def test_checkpoints_that_cannot_be_written(broken: Broken) -> None:
    """Three saves may fail in a row: the alerts fire before the fourth, some 15 s later, ends the run."""
    good, aside = broken.folder / "run" / "checkpoints", broken.folder / "aside"
    good.rename(aside)
    good.write_text("in the way")
    try:
        broken.fires("TandemCheckpointStale")
        broken.fires("TandemCheckpointSaveFailing")
    finally:
        good.unlink()
        aside.rename(good)
    broken.resolves("TandemCheckpointStale")
    broken.resolves("TandemCheckpointSaveFailing")


def test_a_loss_that_is_no_number_ends_the_run_and_the_target_may_go(broken: Broken) -> None:
    assert broken.run.poll() is None, (broken.folder / "log").read_text()
    (broken.knobs / "nan").touch()
    broken.fires("TandemLossNotFinite")
    broken.fires("TandemRunFailed")
    os.killpg(broken.run.pid, signal.SIGKILL)
    broken.resolves("TandemLossNotFinite")
    broken.resolves("TandemRunFailed")


def test_a_target_that_vanishes_and_comes_back(
    tmp_path: Path, processes: Any, module_ports: list[int], require: Any
) -> None:
    require("prometheus")
    run = Broken(tmp_path, processes, [0, 0, *module_ports[:2]])
    os.killpg(run.run.pid, signal.SIGKILL)
    run.fires("TandemTargetDown")
    with (tmp_path / "log").open("a") as log:
        processes.start(run.run.args, cwd=tmp_path, stdout=log)
    run.resolves("TandemTargetDown")
