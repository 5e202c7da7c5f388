"""Options of a run that show in its end or in its files; exact resume has a file of its own."""

import pytest
from small_runs import Runs

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
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
