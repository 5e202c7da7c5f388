"""Numbers as people write them."""

import logging
from pathlib import Path

import pytest

import tandem
from tandem import text
from tandem.telemetry.displays import Progress
from tandem.text import did_you_mean, format_duration, nearest


@pytest.mark.parametrize(("seconds", "said"), [
    (0, "0 s"), (0.0004, "0 s"), (0.0123, "12 ms"), (0.0994, "99 ms"), (0.0996, "0.1 s"), (0.6, "0.6 s"),
    (1.25, "1.2 s"), (9.94, "9.9 s"), (9.96, "10 s"), (25, "25 s"), (59.4, "59 s"), (59.6, "1 min"),
    (60, "1 min"), (184, "3 min 4 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h"), (7500, "2 h 5 min"),
    (7530, "2 h 6 min"), (86399, "1 d"), (90000, "1 d 1 h"), (1e9, "11,574 d 1 h"),
])  # fmt: skip
def test_a_time_has_two_units_at_most(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


def test_steps_and_samples_have_their_commas(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tandem"):
        Progress(30_000, mode="off").report(1200, epoch=2, loss=0.5, samples_per_second=1170.4)
    assert caplog.messages == ["step 1,200 of 30,000 (epoch 2): loss 0.5000, 1,170 samples/s"]


def test_the_nearest_name_and_its_hint() -> None:
    assert nearest("digit", ["mnist", "digits"]) == "digits"
    assert nearest("xyz", ["mnist", "digits"]) is None
    assert nearest("mnixx", ["mnist"], least=0) == "mnist"
    assert did_you_mean("digits", ".") == "; did you mean digits?"
    assert (did_you_mean(None, "."), did_you_mean(None)) == (".", "")


def test_one_helper_words_all_suggestions() -> None:
    sources = set(Path(tandem.__file__).parent.rglob("*.py")) - {Path(text.__file__)}
    texts = {path: path.read_text() for path in sources}
    assert [path for path, text in texts.items() if "difflib" in text or "did you mean {" in text] == []
