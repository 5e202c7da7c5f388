"""What Kubeflow Trainer's endpoint knows when runs end, with TLS, rotating tokens and a server that fails."""

import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from patience import patient
from program_files import program_text
from receivers import Authority, Receiver
from tandem.timeouts import BEAT_SECONDS, TRAINER_SECONDS

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(7200)]
AT_ONCE = 4
STEP_SECONDS = 0.02
FAULTS = (429, 500, 503, 3.0)
"""A number with a point is a hang of so many seconds."""
KINDS = ("task", "loop", "script")
KILLS = ("stopped", "rank killed", "agent killed")


class Ending:
    """One launch with two ranks, in its own directory, and its status server."""

    def __init__(self, runs: Runs, authority: Authority, number: int) -> None:
        self.chance = random.Random(number)
        self.kind = KINDS[number % len(KINDS)]
        self.kill = KILLS[number // len(KINDS) % len(KILLS)]
        self.runs = runs
        self.run = f"run-{number}"
        self.folder = runs.folder / f"of-{number}"
        self.folder.mkdir()
        self.is_healthy = False
        self.server = Receiver(authority.tls, self.answer)
        self.tokens: list[str] = []
        self.token = self.folder / "token"
        self.is_over = threading.Event()
        self.rotate()
        threading.Thread(target=self.keep_rotating, daemon=True).start()
        self.environment = {
            **runs.environment,
            "KUBEFLOW_TRAINER_SERVER_URL": f"{self.server.url}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(authority.ca),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    def answer(self, number: int) -> int | float:
        return 200 if self.is_healthy or self.chance.random() < 0.5 else self.chance.choice(FAULTS)

    def rotate(self) -> None:
        self.tokens.append(f"token-{len(self.tokens)}")
        new = self.token.with_suffix(".new")
        new.write_text(self.tokens[-1])
        new.rename(self.token)

    def keep_rotating(self) -> None:
        while not self.is_over.wait(0.5):
            self.rotate()

    def start(self, steps: int) -> None:
        ours: list[object] = ["--nproc", 2, "--max-restarts", 0]
        if self.kind == "task":
            ours += ["--checkpoint-every", "never", "--steps", steps, "--log-every", 1]
            command = self.runs.command("launch", self.run, *ours, delay=STEP_SECONDS)
        else:
            program = self.folder / "train.py"
            program.write_text(program_text("status_ends_loop"))
            ours += ["--metrics", 0, "--metrics-linger", 0, "--run-dir", self.run]
            words = map(str, (*ours, program, self.kind, self.folder, steps))
            command = [sys.executable, "-m", "tandem", "launch", *words]
        self.launch = self.runs.processes.start(command, cwd=self.runs.folder, env=self.environment)
        self.runs.until(lambda: self.last_step() >= 5, "step 5")

    def last_step(self) -> int:
        """The last step that the run reached, by what it wrote itself."""
        if self.kind != "task":
            path = self.folder / "step"
            return int(path.read_text()) if path.exists() else 0
        path = self.runs.folder / self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def shown(self) -> tuple[int, int | None]:
        """The step and the percentage of the last status that arrived, also if the server then failed."""
        last = self.server.bodies[-1]["trainerStatus"]
        step = next((int(each["value"]) for each in last["metrics"] if each["name"] == "step"), 0)
        return step, last.get("progressPercentage")

    def end(self) -> float:
        """End the launch from outside; the time."""
        at = time.monotonic()
        if self.kill == "stopped":
            self.launch.send_signal(signal.SIGTERM)
        elif self.kill == "rank killed":
            os.kill(rank_processes(self.launch.pid)["tandem-rank-1"], signal.SIGKILL)
        else:
            os.kill(self.launch.pid, signal.SIGKILL)
        return at

    def close(self) -> None:
        self.is_over.set()
        self.server.close()
        times = [each.at for each in self.server.posted]
        pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
        assert all(pause >= TRAINER_SECONDS - 0.05 for pause in pauses), pauses
        used = [each.headers["authorization"].removeprefix("Bearer token-") for each in self.server.posted]
        assert list(map(int, used)) == sorted(map(int, used)) and len(set(used)) == len(used), used


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "authority")


def finished(runs: Runs, authority: Authority, number: int) -> str:
    """What is wrong with a run that finishes while the server fails half of the time."""
    ending = Ending(runs, authority, number)
    ending.start(ending.chance.randrange(100, 500))
    output, _ = ending.launch.communicate(timeout=patient(120))
    ending.close()
    step, percent = ending.shown()
    last = ending.last_step()
    print(f"{number} {ending.kind} finished: {percent}%, step {step} of {last}", flush=True)
    is_right = (ending.launch.returncode, percent, step) == (0, 100, last)
    return "" if is_right else f"{number} {ending.kind}: {percent}%, step {step} of {last}\n{output}"


def killed(runs: Runs, authority: Authority, number: int) -> str:
    """What is wrong with a run that is killed; the server is well again by then."""
    ending = Ending(runs, authority, number)
    ending.is_healthy = ending.kill == "agent killed"
    ending.start(1_000_000)
    time.sleep(ending.chance.uniform(3.0, 12.0))
    ending.is_healthy = True
    # The agent does not know the steps since the last heartbeat.
    known = ending.last_step() - int(patient(2 * BEAT_SECONDS) / STEP_SECONDS)
    at = ending.end()
    output, _ = ending.launch.communicate(timeout=patient(120))
    age = at - ending.server.posted[-1].at
    ending.close()
    step, percent = ending.shown()
    told = f"{number} {ending.kind} {ending.kill}: step {step}, {known} at the kill, {age:+.1f} s before it"
    print(told, flush=True)
    if ending.kill == "agent killed":
        return "" if age < patient(TRAINER_SECONDS) else told
    return "" if known <= step <= ending.last_step() and percent != 100 else f"{told}\n{output}"


@pytest.mark.parametrize("trial", [finished, killed])
@pytest.mark.parametrize("count", [int(os.environ.get("TEST_ENDS", 100))])
def test_the_last_status_arrives(runs: Runs, authority: Authority, trial: Any, count: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(filter(None, pool.map(lambda number: trial(runs, authority, number), range(count))))
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
