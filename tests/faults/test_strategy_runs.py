"""Whole runs with sharded parameters: a killed one has the bits of a calm one; ddp reads its states."""

import json
import os
import signal
import sys

import pytest
from small_runs import Runs, rank_processes

from needs import require_strategy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _has_fsdp() -> None:
    require_strategy("fsdp")


FLAGS = ("--nproc", 2, "--device", "cpu", "--threads", 1, "--checkpoint-every", 10, "--log-every", 15)


@pytest.mark.parametrize("nodes", [1, 2])
def test_fsdp_killed_and_resumed_has_the_bits_of_a_calm_run(runs: Runs, nodes: int) -> None:
    calm = runs.finish("launch", "calm", *FLAGS, "--strategy", "fsdp", "--steps", 60)
    flags = ("--nodes", nodes, "--nproc", 2 // nodes, *FLAGS[2:], "--strategy", "fsdp", "--steps", 60)
    broken = runs.start("launch", "broken", *flags, delay=0.05)
    runs.wait_for_step("broken", 20)
    os.kill(rank_processes(broken.pid)["tandem-rank-1"], signal.SIGKILL)
    code, output = runs.processes.wait(broken)
    assert code == 0, output
    summary = runs.summary("broken")
    assert summary["restarts"] == 1 and summary["resumed_from_step"] >= 20
    (resumed,) = [each for each in runs.events("broken", "resumed") if each["step"]]
    assert resumed["source"] == "memory of this node"
    assert summary["weights_sha256"] == calm["weights_sha256"] and summary["loss"] == calm["loss"]
    calm_lines, broken_lines = (
        [json.loads(line).get("scores") for line in (runs.folder / run / "metrics.jsonl").open()]
        for run in ("calm", "broken")
    )
    assert broken_lines == calm_lines and any(calm_lines)


def test_a_run_changes_its_strategy_and_goes_on(runs: Runs) -> None:
    said = ""
    for last, name in ((20, "fsdp"), (30, "ddp"), (40, "fsdp")):
        flags = (*FLAGS, "--strategy", name, "--steps", last, "--schedule", "constant")
        code, output = runs.processes.wait(runs.start("launch", "run", *flags))
        assert code == 0, output
        said += output
    ddp = runs.finish("launch", "ddp", *FLAGS, "--strategy", "ddp", "--steps", 40, "--schedule", "constant")
    changed = runs.summary("run")
    assert changed["global_step"] == 40 and changed["resumed_from_step"] == 30
    assert changed["loss"] == pytest.approx(ddp["loss"], abs=1e-5)
    assert said.count("strategy was fsdp and is ddp now") == 1, said
    assert said.count("strategy was ddp and is fsdp now") == 1, said


def test_verbs_read_a_sharded_checkpoint(runs: Runs) -> None:
    summary = runs.finish("launch", "run", *FLAGS, "--strategy", "fsdp", "--steps", 20)
    assert len([*(runs.folder / "run/checkpoints/step-000000020").glob("shard-*-of-00002.bin")]) == 2

    def tandem(*words: str) -> str:
        command = [sys.executable, "-m", "tandem", *words]
        code, output = runs.processes.wait(
            runs.processes.start(command, cwd=runs.folder, env=runs.environment)
        )
        assert code == 0, output
        return str(output)

    assert tandem("checkpoints", "verify", "run").count("verified") == 2
    assert summary["weights_sha256"][:12] in tandem("export", "run", "--format", "torch", "--output", "w.pt")
    scores = json.loads(tandem("eval", "run", "--json", "--device", "cpu", "--nproc", "2").splitlines()[-1])
    assert scores["eval"]["accuracy"] == summary["eval"]["accuracy"]
    first = ("--steps", "1", "--init-from", "run", "--nproc", "1", "--device", "cpu", "--strategy", "single")
    code, output = runs.processes.wait(runs.start("launch", "next", *first))
    assert code == 0 and "starting from run: 100.0%" in output.replace(str(runs.folder) + "/", ""), output
