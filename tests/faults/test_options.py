"""Options of a run that show in its end or in its files; exact resume has a file of its own."""

import json
import sys

import pytest
from small_runs import Runs

from program_files import program_text

pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
def test_a_loss_that_is_not_finite_ends_the_run(runs: Runs) -> None:
    flags = ("--nodes", 2, "--lr", "1e30", "--schedule", "constant", "--steps", 40)
    code, output = runs.processes.wait(runs.start("launch", "nan", *flags))
    assert code == 1, output
    assert "is not finite" in output and "Traceback" not in output


def test_tensorboard_and_profile_are_written(runs: Runs) -> None:
    runs.finish(
        "launch", "seen", "--steps", 12, "--tracker", "tensorboard", "--profile", "3:4",
        "--checkpoint-every", "1s"
    )
    assert list((runs.folder / "seen" / "tensorboard").glob("events*"))
    assert (runs.folder / "seen" / "profile" / "rank-0.json").stat().st_size > 1000


def test_a_run_again_from_its_config_json_has_the_same_bits(runs: Runs) -> None:
    first = runs.finish("launch", "first", "--nodes", 2, "--steps", 12, "--lr", 0.05, "--seed", 3)
    launch = [sys.executable, "-m", "tandem", "launch", "--config", "first/config.json"]
    code, output = runs.processes.wait(runs.processes.start(launch, cwd=runs.folder, env=runs.environment))
    assert code == 0, output
    ignored = "first/config.json: ignoring the other run's paths and addresses: run_dir, node_rank, master"
    assert output.count(ignored) == output.count("ignoring") == 1, output
    (again,) = (runs.folder / "runs").iterdir()
    summary = json.loads((again / "summary.json").read_text())
    assert summary["weights_sha256"] == first["weights_sha256"] and summary["nodes"] == 2


OWN_OPTIMIZER = program_text("options_own_optimizer")


@pytest.mark.soak
def test_a_typed_default_is_warned_of_and_the_summary_has_what_was_used(runs: Runs) -> None:
    (runs.folder / "own.py").write_text(OWN_OPTIMIZER)
    flags = ("--task", "own.py:Own", "--steps", 3, "--eval-every", "never", "--lr", "0.1")
    code, output = runs.processes.wait(runs.start("launch", "own", *flags))
    assert code == 0, output
    assert output.count("the task has its own optimizer: --lr 0.1\n") == 1, output
    summary = runs.summary("own")
    assert (summary["optimizer"], summary["lr"], summary["schedule"]) == ("Adam", 0.003, None)
