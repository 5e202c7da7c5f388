"""Ways to take a step, each stopped in the middle and resumed: the weights are those of a calm run."""

import pytest
from small_runs import Runs

pytestmark = pytest.mark.timeout(300)

OPTIONS = {
    "fp16": ("--precision", "fp16"),
    "bf16": ("--precision", "bf16"),
    "accumulation": ("--micro-batch-size", 5, "--clip-norm", 1.0, "--optimizer", "adamw", "--warmup", "10%"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_has_the_weights_of_a_calm_one(runs: Runs, name: str) -> None:
    flags = ("--steps", 30, "--checkpoint-every", 10, *OPTIONS[name])
    calm = runs.finish("launch", "calm", *flags)
    process = runs.start("launch", "stopped", *flags, delay=0.05)
    runs.wait_for_step("stopped", 10)
    process.terminate()
    assert runs.processes.wait(process)[0] == 143
    assert runs.summary("stopped")["global_step"] < 30
    code, output = runs.processes.wait(runs.start("launch", "stopped", *flags, delay=0.05))
    assert code == 0, output
    assert runs.summary("stopped")["weights_sha256"] == calm["weights_sha256"]


def test_a_loss_that_is_not_finite_ends_the_run(runs: Runs) -> None:
    flags = ("--nodes", 2, "--lr", "1e30", "--schedule", "constant", "--steps", 40)
    code, output = runs.processes.wait(runs.start("launch", "nan", *flags))
    assert code == 1, output
    assert "is not finite" in output and "Traceback" not in output


def test_tensorboard_and_profile_are_written(runs: Runs) -> None:
    runs.finish(
        "launch", "seen", "--steps", 12, "--tensorboard", "--profile", "3:4", "--checkpoint-every", "1s"
    )
    assert list((runs.folder / "seen" / "tensorboard").glob("events*"))
    assert (runs.folder / "seen" / "profile" / "rank-0.json").stat().st_size > 1000
