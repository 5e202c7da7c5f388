"""Real trackers: an MLflow server that is killed, and Weights & Biases without one; runs that are killed.

The packages are those of `make frameworks`. TANDEM_REQUIRE=frameworks fails where they are missing.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from patience import patient

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
HERE = Path(__file__).parent


class Tracked:
    """Runs whose python has a tracker's package."""

    def __init__(self, runs: Runs, package: str, require: Any) -> None:
        self.python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
        look = f"import importlib.util as util; exit(util.find_spec('{package}') is None)"
        found = subprocess.run([self.python, "-c", look], check=False).returncode == 0
        require("frameworks", found, f"no package {package}: make frameworks")
        self.runs, self.package, self.folder = runs, package, runs.folder
        own = {"WANDB_MODE": "offline", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes less
        self.environment = {**runs.environment, **own}

    def start(self, *flags: object, delay: float = 0.05) -> Any:
        every = ["--log-every", 10, "--checkpoint-every", 25, "--snapshot-every", "never"]
        ours = self.runs.command("launch", "run", *every, "--tracker", self.package, *flags, delay=delay)
        return self.begin(*ours[1:])

    def begin(self, *words: str) -> Any:
        return self.runs.processes.start([self.python, *words], cwd=self.folder, env=self.environment)

    def finish(self, process: Any) -> str:
        code, output = self.runs.processes.wait(process, 400)
        assert code == 0, output
        return str(output)

    def asked(self, program: str, *words: object) -> Any:
        """The JSON that a program of trackers_asked.py prints."""
        found = self.begin(str(HERE / "trackers_asked.py"), program, *map(str, words))
        return json.loads(self.finish(found).splitlines()[-1])

    def sent(self) -> int:
        path = self.folder / "run" / "tracker.json"
        return int(json.loads(path.read_text())[self.package]["sent"]) if path.exists() else 0

    def until_sent(self, rows: int) -> None:
        self.runs.until(lambda: self.sent() >= rows, f"{rows} rows at the tracker", 300)

    def log(self) -> str:
        path = self.folder / "run" / "log" / "node-0.log"
        return path.read_text() if path.exists() else ""

    def steps(self, kind: str) -> list[int]:
        """Those that metrics.jsonl has."""
        lines = map(json.loads, (self.folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [line["step"] for line in lines if kind in line]


@pytest.fixture
def at_mlflow(runs: Runs, require: Any) -> Tracked:
    return Tracked(runs, "mlflow", require)


@pytest.fixture
def at_wandb(runs: Runs, require: Any) -> Tracked:
    return Tracked(runs, "wandb", require)


def start_server(tracked: Tracked, port: int) -> Any:
    store = f"sqlite:///{tracked.folder}/mlflow.db"
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    with (tracked.folder / "server.log").open("a") as output:
        server = tracked.runs.processes.start(
            [tracked.python, "-m", "mlflow", "server", *words],
            cwd=tracked.folder, env=tracked.environment, stdout=output,
        )  # fmt: skip
    log = tracked.folder / "server.log"
    before = log.read_text().count("startup complete")
    tracked.runs.until(lambda: log.read_text().count("startup complete") > before, "server", 300)
    return server


def test_a_server_that_is_killed_costs_no_step_and_gets_each_once(at_mlflow: Tracked, free_port: int) -> None:
    at_mlflow.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{free_port}"
    at_mlflow.environment["MLFLOW_EXPERIMENT_NAME"] = "trackers"
    server = start_server(at_mlflow, free_port)
    # It outlasts a slow server's answers, and need not once the server has been missed.
    run = at_mlflow.start("--nproc", 2, "--epochs", 3, delay=0.4)
    at_mlflow.until_sent(2)
    at_mlflow.runs.processes.kill(server)
    at_mlflow.runs.until(lambda: "mlflow does not accept rows" in at_mlflow.log(), "warning")
    os.kill(rank_processes(run.pid)["tandem-rank-1"], signal.SIGKILL)
    at_mlflow.runs.hurry()
    output = at_mlflow.finish(run)
    (at_mlflow.folder / "at-full-speed").unlink()
    assert output.count("mlflow does not accept rows") == 1, output
    assert "run is not fully uploaded to mlflow; to send the rest, run: tandem track" in output
    assert at_mlflow.runs.events("run", "rank_killed"), output
    assert at_mlflow.sent() < len(at_mlflow.steps("loss"))

    start_server(at_mlflow, free_port)
    output = at_mlflow.finish(at_mlflow.begin("-m", "tandem", "track", "run"))
    assert "rows sent to mlflow" in output
    once = at_mlflow.asked("mlflow", "run")
    assert Counter(once["train/loss"]) == Counter(at_mlflow.steps("loss"))
    assert Counter(once["eval/accuracy"]) == Counter(at_mlflow.steps("eval"))
    assert (once["status"], once["experiment"]) == ("FINISHED", "trackers")
    assert (once["params"]["epochs"], once["params"]["task.delay"]) == ("3", "0.4")

    at_mlflow.finish(at_mlflow.start("--nproc", 2, "--epochs", 4, delay=0.4))  # the same run goes on
    longer = at_mlflow.asked("mlflow", "run")
    assert longer["run"] == once["run"] and (longer["runs"], longer["status"]) == (1, "FINISHED")
    assert Counter(longer["train/loss"]) == Counter(at_mlflow.steps("loss"))
    assert longer["tags"]["now.epochs"] == "4"


@pytest.mark.soak
def test_a_server_that_hangs_has_one_run_in_the_end(at_mlflow: Tracked, free_port: int) -> None:
    """Requests that nobody waited for any longer are answered when it goes on: two of them make a run."""
    at_mlflow.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{free_port}"
    server = start_server(at_mlflow, free_port)
    os.killpg(server.pid, signal.SIGSTOP)
    output = at_mlflow.finish(at_mlflow.start("--steps", 150))
    assert "run is not fully uploaded to mlflow; to send the rest, run: tandem track" in output
    os.killpg(server.pid, signal.SIGCONT)
    at_mlflow.finish(at_mlflow.begin("-m", "tandem", "track", "run"))
    found = at_mlflow.asked("mlflow", "run")
    assert found["runs"] == 1 and found["status"] == "FINISHED"
    assert Counter(found["train/loss"]) == Counter(at_mlflow.steps("loss"))


def test_a_killed_launch_goes_on_as_the_same_run_of_wandb(at_wandb: Tracked) -> None:
    first = at_wandb.start("--epochs", 3)
    at_wandb.until_sent(6)
    at_wandb.runs.wait_for_step("run", 50)
    os.kill(first.pid, signal.SIGKILL)  # the agent; what sends its rows hears of it
    first.communicate(timeout=patient(100))
    at_wandb.finish(at_wandb.start("--epochs", 3))
    kept = at_wandb.asked("wandb", *sorted((at_wandb.folder / "run" / "wandb").glob("offline-run-*/*.wandb")))
    (only,) = {each["run"] for each in kept}
    assert json.loads((at_wandb.folder / "run" / "tracker.json").read_text())["wandb"]["run"] == only
    assert len(kept) == 2 and kept[-1]["exit"] == 0
    rows = [row for each in kept for row in each["rows"]]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert Counter(row["step"] for row in rows if "train/loss" in row) == Counter(at_wandb.steps("loss"))
    assert Counter(row["step"] for row in rows if "eval/accuracy" in row) == Counter(at_wandb.steps("eval"))


@pytest.mark.soak
def test_resume_never_is_another_run_there(runs: Runs, require: Any) -> None:
    tracked = Tracked(runs, "mlflow", require)
    tracked.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{runs.folder}/mlflow.db"
    found = []
    for _ in range(2):
        tracked.finish(tracked.start("--steps", 20, "--resume", "never"))
        found.append(json.loads((runs.folder / "run" / "tracker.json").read_text())["mlflow"])
    assert found[0]["run"] != found[1]["run"]
    assert [each["step"] for each in found] == [20, 20]
