"""Whole runs with sharded parameters: a killed one has the bits of a calm one; ddp reads its states."""

import json
import os
import signal

import pytest
from small_runs import Runs, rank_processes

from needs import require_strategy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _has_fsdp() -> None:
    require_strategy("fsdp")


FLAGS = ("--nproc", 2, "--device", "cpu", "--threads", 1, "--checkpoint-every", 10, "--log-every", 15)


@pytest.mark.slow
def test_fsdp_killed_and_resumed_has_the_bits_of_a_calm_run(runs: Runs) -> None:
    calm = runs.finish("launch", "calm", *FLAGS, "--strategy", "fsdp", "--steps", 60)
    broken = runs.start("launch", "broken", *FLAGS, "--strategy", "fsdp", "--steps", 60, delay=0.05)
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


@pytest.mark.slow
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
