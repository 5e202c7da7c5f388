"""--keep-best tells when it cannot work: evaluations that are not saved, scores that nobody gives."""

import logging

import pytest

from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.telemetry.clock import Clock
from tandem.telemetry.recorder import Recorder
from tandem.training.loop import EVENTS, EventSchedule
from tandem.training.saving import warn_of_missing_score


@pytest.mark.parametrize(
    "evaluate, save, all_saved",
    [
        ("1epoch", "1epoch", True),
        ("1epoch", "50", True),
        ("1epoch", "0.5epochs", True),
        ("2epochs", "1epoch", True),
        ("1epoch", "2epochs", False),
        ("100", "30", False),
        ("30s", "30s", True),
        ("1epoch", "30s", False),
        ("never", "1epoch", False),
        ("never", "never", False),
        ("10%", "10%", True),
    ],
)
def test_evaluations_that_are_saved(evaluate: str, save: str, all_saved: bool) -> None:
    every = dict.fromkeys(EVENTS, "never") | {"eval": evaluate, "save": save}
    assert EventSchedule.of(100, 400, **every).saves_every_evaluation() == all_saved


def test_a_score_that_nobody_gives_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    warn_of_missing_score("accuracy", 100, {"accuracy": 0.5, "loss": 1.0})
    warn_of_missing_score("acuracy", 100, {})
    warn_of_missing_score(None, 100, {"loss": 1.0})
    assert not caplog.records
    warn_of_missing_score("acuracy:max", 100, {"accuracy": 0.5, "loss": 1.0})
    assert "the evaluation at step 100 returned only accuracy, loss" in caplog.text


def test_scores_belong_to_the_step_of_their_evaluation() -> None:
    recorder = Recorder(1, 8, lambda message: None, Clock())
    assert recorder.scores_at(0) == {}
    recorder.evaluated(100, {"accuracy": 0.5})
    assert recorder.scores_at(100) == {"accuracy": 0.5} and recorder.scores_at(150) == {}


@pytest.mark.parametrize("text", ["accuracy:best", ":max", "a b", "a:b:max"])
def test_keep_best_is_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="METRIC:min or METRIC:max"):
        Settings.from_dict({"keep_best": text})
