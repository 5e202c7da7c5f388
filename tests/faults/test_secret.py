"""Machines with a secret of their job, and somebody on their network who does not know it."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes
from test_listening import beyond_loopback, open_to

from networks import Machine
from program_files import program_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
LIMIT = 250.0
PORT = 29600
SECRET = "a secret of this job alone"
SLOW = 0.02
FLAGS = ("--steps", 300, "--checkpoint-every", 20, "--threads", 1)  # each machine would use all cores

SCRIPT = program_text("secret_script")

HELD = program_text("secret_held")
"""Trains no further than step 20 and a bit while there is a file `hold`."""

ENEMY = program_text("secret_enemy")
"""What somebody without the secret may say: torch's own words, TLS and junk, 100 times a second."""


class Job:
    """Two nodes on machines 0 and 1; each is a session of its own."""

    def __init__(self, runs: Runs, network: Sequence[Machine], *flags: object, secret: str = SECRET) -> None:
        self.runs, self.network, self.flags, self.secret = runs, network, flags, secret
        self.nodes = [self.start(node) for node in (0, 1)]

    def start(self, node: int, at: int | None = None, secret: str | None = None, *more: object) -> Any:
        own = ("--nodes", 2, "--node-rank", node, "--master", f"{self.network[0].address}:{PORT}")
        command = self.runs.command("launch", "run", *own, *self.flags, *more, delay=SLOW)
        given = {"TANDEM_JOB_SECRET": self.secret if secret is None else secret, "GLOO_SOCKET_IFNAME": "eth0"}
        on = self.network[node if at is None else at].on
        environment = {**self.runs.environment, **given}
        return self.runs.processes.start([*on, *command], cwd=self.runs.folder, env=environment)

    def kill(self, node: int) -> None:
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()

    def ended(self) -> tuple[list[int], str]:
        """Their codes, and all that they have said."""
        ended = [self.runs.processes.wait(node, LIMIT) for node in self.nodes]
        return [code for code, _ in ended], "\n".join(output for _, output in ended)


def test_nodes_with_the_secret_recover_and_an_enemy_changes_nothing(
    runs: Runs, network: Sequence[Machine]
) -> None:
    undisturbed = runs.undisturbed(*FLAGS)
    (runs.folder / "enemy.py").write_text(ENEMY)
    command = [*network[2].on, sys.executable, "enemy.py", network[0].address, str(PORT)]
    enemy = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    job = Job(runs, network, *FLAGS)
    runs.wait_for_step("run", 40)
    for index, node in enumerate(job.nodes):  # the gate, and gloo's
        seen = {each for each in beyond_loopback(open_to(node.pid)) if "tandem-rank" not in each}
        assert {each.split()[2] for each in seen} == ({str(PORT)} if index == 0 else set()), seen
    (pid,) = rank_processes(job.nodes[1].pid).values()
    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    os.kill(pid, signal.SIGKILL)
    runs.wait_for_step("run", 100)
    job.kill(1)
    job.nodes[1] = job.start(1)
    runs.wait_for_step("run", 180)
    job.kill(0)
    job.nodes[0] = job.start(0)
    codes, output = job.ended()
    assert enemy.poll() is None, "it has ended before the job"
    assert codes == [0, 0], output
    assert "has no secret" not in output and "Traceback" not in output
    assert output.count("it has a different secret") == 1  # of the node 0 that ended
    summary = runs.summary("run")
    assert summary["global_step"] == 300 and summary["weights_sha256"] == undisturbed
    written = [each for each in (runs.folder / "run").rglob("*") if each.is_file()]
    assert len(written) > 5 and not [each for each in written if SECRET.encode() in each.read_bytes()]
    assert SECRET not in output


def test_who_has_another_secret_or_none_is_told_so_and_the_others_train_on(
    runs: Runs, network: Sequence[Machine]
) -> None:
    undisturbed = runs.undisturbed(*FLAGS)
    (runs.folder / "held.py").write_text(HELD)
    (runs.folder / "hold").touch()
    job = Job(runs, network, *FLAGS, "--task", "held.py:Held", "--hang-timeout", 900)
    runs.wait_for_step("run", 20)
    says = {SECRET + "!": "node 0 has a different secret", "": "node 0 has a secret, but this node has none"}
    strangers = [job.start(1, 2, secret, "--master-timeout", 2) for secret in says]
    for stranger, words in zip(strangers, says.values(), strict=True):
        code, output = runs.processes.wait(stranger, LIMIT)
        line = f"{network[0].address}:{PORT} refused this node: {words}"
        assert code == 200 and f"ended with code 200: {line}" in output, output
        assert output.count(words) == 2, f"as it begins to ask, and at its end: {output}"
        assert "Exception raised" not in output
    (runs.folder / "hold").unlink()
    codes, output = job.ended()
    assert codes == [0, 0], output
    assert runs.summary("run")["weights_sha256"] == undisturbed
    assert [event["world_size"] for event in runs.events("run", "world")] == [2]


def test_a_job_with_a_secret_saves_and_stops(runs: Runs, network: Sequence[Machine]) -> None:
    job = Job(runs, network, "--steps", 100_000, "--checkpoint-every", 20, "--shutdown-timeout", 200)
    runs.wait_for_step("run", 20)
    for node in job.nodes:
        node.terminate()
    codes, output = job.ended()
    assert codes == [143, 143], output


@pytest.mark.soak
def test_a_job_without_a_secret_says_once_what_is_open(runs: Runs, network: Sequence[Machine]) -> None:
    job = Job(runs, network, "--steps", 20, secret="")
    codes, output = job.ended()
    assert codes == [0, 0], output
    assert output.count("no secret") == 1
    assert f"(TANDEM_JOB_SECRET): anyone who can reach port {PORT} can end it" in output


def test_a_mistake_of_one_node_is_told_through_the_gate(runs: Runs, network: Sequence[Machine]) -> None:
    job = Job(runs, network, "--steps", 20)
    job.kill(1)
    job.nodes[1] = job.start(1, None, None, "--epoks", 3)
    codes, output = job.ended()
    assert codes == [2, 2], output
    assert "ended with code 2: another node ended the job with code 2: node 1: unknown flag --epoks" in output


@pytest.mark.soak
def test_ranks_of_a_script_meet_through_the_gate(runs: Runs, network: Sequence[Machine]) -> None:
    (runs.folder / "script.py").write_text(SCRIPT)
    own = ["--nodes", "2", "--master", f"{network[0].address}:{PORT}", "--run-dir", "run"]
    environment = {**runs.environment, "TANDEM_JOB_SECRET": SECRET, "GLOO_SOCKET_IFNAME": "eth0"}
    nodes = []
    for index in (0, 1):
        command = ["-m", "tandem", "launch", *own, "--metrics", "0", "--node-rank", str(index)]
        line = [*network[index].on, sys.executable, *command, "script.py"]
        nodes.append(runs.processes.start(line, cwd=runs.folder, env=environment))
    ended = [runs.processes.wait(node, LIMIT) for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "sum 2 by 127.0.0.1" in ended[0][1]
    assert "sum 2 by 127.0.0.1" in (runs.folder / "run" / "log" / "rank-1.log").read_text()
