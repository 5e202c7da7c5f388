"""Launches that tell a webhook and Kubeflow Trainer how they are, and keep both secrets to themselves."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text
from receivers import Authority, Receiver
from tandem.timeouts import TRAINER_SECONDS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
SECRET = "T0123ABCD/B0123ABCD/notASecretOfAnyone99"
TOKEN = "the-token-of-this-pod"


class Outside:
    """A webhook and a status endpoint, and the variables that name them."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        authority = Authority(folder / "authority")
        self.webhook = Receiver()
        self.trainer = Receiver(authority.tls)
        (folder / "token").write_text(TOKEN)
        self.address = f"{self.webhook.url}/services/{SECRET}"
        self.platform = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"{self.trainer.url}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(authority.ca),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }
        self.runs = runs

    def told(self) -> list[str]:
        return [each["event"] for each in self.webhook.bodies]

    def statuses(self) -> list[dict[str, Any]]:
        return [dict(each["trainerStatus"]) for each in self.trainer.bodies]

    def check_secrets(self, run: str, *texts: str) -> None:
        """Nothing that the launch has written, or its output, has a part of the address or the token."""
        files = [path for path in (self.runs.folder / run).rglob("*") if path.is_file()]
        assert len(files) > 5
        for text in [*texts, *(path.read_bytes().decode(errors="replace") for path in files)]:
            assert "notASecret" not in text and TOKEN not in text and "B0123ABCD" not in text

    def check_pauses(self) -> None:
        times = [each.at for each in self.trainer.posted]
        assert all(b - a >= TRAINER_SECONDS for a, b in zip(times, times[1:], strict=False)), times


@pytest.fixture
def outside(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    here = Outside(runs, tmp_path_factory.mktemp("outside"))
    yield here
    here.webhook.close()
    here.trainer.close()


def test_a_task_whose_rank_is_killed(runs: Runs, outside: Outside) -> None:
    runs.environment |= {"TANDEM_NOTIFY": outside.address, **outside.platform}
    process = runs.start("launch", "run", "--nproc", 2, "--steps", 300, "--checkpoint-every", 50, delay=0.02)
    runs.wait_for_step("run", 50)
    ranks = rank_processes(process.pid)
    variables = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks.values())
    assert b"notASecret" not in variables
    os.kill(ranks["tandem-rank-1"], signal.SIGKILL)
    code, output = runs.processes.wait(process)
    assert code == 0, output
    assert outside.told() == ["recovered", "finished"]
    recovered = outside.webhook.bodies[0]
    assert (recovered["run"], recovered["rank"], recovered["node"]) == ("run", 1, 0)
    assert "SIGKILL" in recovered["cause"] and recovered["step"] >= 50
    assert [event["event"] for event in runs.events("run", "notified")] == ["recovered", "finished"]
    first, *_, last = outside.statuses()
    assert "progressPercentage" not in first and last["progressPercentage"] == 100
    assert {"name": "step", "value": "300"} in last["metrics"]
    assert outside.trainer.posted[0].headers["authorization"] == f"Bearer {TOKEN}"
    page = (runs.folder / "run" / "metrics.prom").read_text()
    # The last message is sent while this page is written.
    assert re.search(r'tandem_outgoing_requests_total\{outcome="sent",to="webhook"\} [12]\.0', page), page
    outside.check_pauses()
    outside.check_secrets("run", output)


def test_simulated_nodes_whose_task_fails(runs: Runs, outside: Outside) -> None:
    """Started by a real interpreter, whose arguments `ps` shows; the servers refuse everything."""
    outside.webhook.answers = outside.trainer.answers = lambda number: 403
    runs.environment |= outside.platform
    (runs.folder / "fails.py").write_text(program_text("outgoing_fails"))
    ours = ["--task", "fails.py:Failing", "--notify", outside.address, "--steps", 100]
    flags = [*ours, "--nodes", 2]
    command = runs.command("launch", "run", *flags, delay=0.05)
    # Not a fork of another process: `bufsize` makes it a program of its own.
    process = runs.processes.start(command, cwd=runs.folder, env=runs.environment, bufsize=-1)
    runs.until((runs.folder / "trains").exists, "training")
    shown = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "notASecret" not in shown and "--notify ****" in shown
    (runs.folder / "fail").touch()
    code, output = runs.processes.wait(process)
    assert code == 1, output
    assert outside.told() == ["failed"]
    failed = outside.webhook.bodies[0]
    assert "enough of it" in failed["text"] and "exit code 1" in failed["text"]
    assert not runs.events("run", "notified"), "it was refused"
    page = (runs.folder / "run" / "metrics.prom").read_text()
    assert 'tandem_outgoing_requests_total{outcome="failed",to="trainer"}' in page
    outside.check_secrets("run", output)
    # Another attempt fails in the same way, and is told of because the first message was refused.
    outside.webhook.answers = lambda number: 200
    for _ in range(2):
        assert runs.processes.wait(runs.start("launch", "run", *ours, "--nproc", 1))[0] == 1
    assert outside.told() == ["failed", "failed"]


def test_a_script_that_hangs(runs: Runs, outside: Outside) -> None:
    (runs.folder / "train.py").write_text(program_text("outgoing_script"))
    runs.environment |= {"TANDEM_NOTIFY": outside.address, **outside.platform}
    outside.webhook.answers = lambda number: 30.0 if number == 1 else 200
    words = ["--nproc", 2, "--metrics", 0, "--metrics-linger", 0, "--run-dir", "run", "train.py"]
    command = [sys.executable, "-m", "tandem", "launch", *map(str, words)]
    process = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    runs.until(lambda: any("metrics" in each and _step(each) > 5 for each in outside.statuses()), "steps")
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGSTOP)
    runs.until(lambda: runs.events("run", "recovered"), "recovery")
    (runs.folder / "enough").touch()
    code, output = runs.processes.wait(process)
    assert code == 0, output
    # The webhook hangs at first, and gets that message again.
    assert [event["event"] for event in runs.events("run", "notified")] == ["hang", "recovered", "finished"]
    assert outside.webhook.bodies[0]["rank"] == 1 and outside.told()[-3:] == ["hang", "recovered", "finished"]
    assert outside.statuses()[-1]["progressPercentage"] == 100
    assert all("progressPercentage" not in each for each in outside.statuses()[:-1])
    outside.check_pauses()
    outside.check_secrets("run", output)


def _step(status: dict[str, Any]) -> int:
    return next(int(each["value"]) for each in status["metrics"] if each["name"] == "step")
