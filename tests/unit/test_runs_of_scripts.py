"""What a run of a script says where only a task would do, and how it shows its numbers and differences."""

import logging
from pathlib import Path

import pytest

from tandem.config import Given, Settings
from tandem.config.task_names import is_script
from tandem.errors import ConfigError
from tandem.launch.eval_command import settings_of
from tandem.launch.script_process import only_rank_0_reports
from tandem.platforms.environment import Placement
from tandem.telemetry.displays import Progress
from tandem.verify.outcome import Outcome, difference


def test_a_run_of_a_script_has_no_evaluation() -> None:
    info = {"settings": Settings().replace(task="port").to_dict()}
    with pytest.raises(ConfigError, match=r"script \(port\).*tandem export"):
        settings_of(Path("runs/port/checkpoints"), info, {}, {})
    settings_of(Path("runs/port/checkpoints"), info, {"task": Given("digits", "flag --task", "--task")}, {})
    assert not any(map(is_script, ("digits", "my_task.py:MyTask", "my_task.py", "package.module:Task")))


def test_at_most_four_numbers_of_a_loop_are_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    numbers = {name: 0.5 for name in "abcde"}
    with caplog.at_level(logging.INFO, "tandem"):
        Progress(100, mode="off").report(5, epoch=1, loss=0.25, samples_per_second=10, more=numbers)
    assert caplog.messages == [
        "step 5 of 100 (epoch 1): loss 0.2500, a 0.5, b 0.5, c 0.5, d 0.5, 10 samples/s"
    ]


def test_the_value_that_differs_is_named() -> None:
    def outcome(ema: float) -> Outcome:
        return Outcome(31, {}, "", {}, [{"step": 31, "loss": 1.0, "scores": {"ema": ema}}], 1)

    assert difference(outcome(1.5), outcome(1.6)) == "`ema` differs at step 31: 1.6 instead of 1.5"


def test_a_mistake_that_all_ranks_find_is_printed_by_rank_0() -> None:
    for rank, raised in ((0, ConfigError), (None, ConfigError), (1, SystemExit)):
        placement = Placement("torchrun", 1, 0, 2, "localhost", 29500, rank=rank)
        with pytest.raises(raised), only_rank_0_reports(placement, wait_seconds=0.0):
            raise ConfigError("no run directory is set")
