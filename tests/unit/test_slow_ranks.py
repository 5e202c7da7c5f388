"""Who holds the others back in a script: said once, on the page and as a metric, from heartbeats."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.launch.watchdog import SlowRanks
from tandem.telemetry import stragglers
from tandem.telemetry.hangs import Beat
from tandem.telemetry.messages import Message, Ranks, Samples
from tandem.telemetry.registry import Registry

BEAT = Beat(
    rank=0, node=0, node_name="here", step=70, activity="train", phase="train.py:8", quiet=0.0, limit=9.0,
    hang=9.0, trained=True, waiting=False, own=0.02, quick=0.019, doing="train.py:8",
)  # fmt: skip
SLOW = replace(BEAT, rank=1, node=1, own=0.08, quick=0.07, doing="train.py:31")


class Heard:
    def __init__(self) -> None:
        self.registry, self.page = Registry(), Ranks([], None)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def tell(self, message: Message) -> None:
        if isinstance(message, Samples):
            self.registry.apply(message.samples)
        if isinstance(message, Ranks):
            self.page = message

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def test_the_slow_rank_of_a_script_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stragglers, "NAME_SECONDS", 1e-9)  # as if long were between any two looks
    heard = Heard()
    watch = SlowRanks(heard.tell, heard.event, pause=0.0)
    for _ in range(8):
        watch.look([SLOW, BEAT])
    assert len(heard.events) == 1 and heard.events[0][0] == "straggler"
    assert heard.events[0][1].items() >= {"rank": 1, "node": 1, "place": "train.py:31"}.items()
    assert "straggler: rank 1 on node 1 needs 80.0 ms per step" in caplog.text
    assert "most of it at train.py:31" in caplog.text
    page = heard.registry.page().decode()
    assert 'tandem_straggler_excess_seconds{node="1",phase="other",rank="1"} 0.06' in page
    assert 'tandem_rank_compute_seconds{node="0",rank="0"} 0.02' in page
    assert "tandem_rank_data_seconds{" not in page  # nobody knows
    assert [row["straggler"] for row in heard.page.rows] == [False, True]
    for _ in range(12):
        watch.look([replace(SLOW, own=0.021, quick=0.019), BEAT])
    assert "tandem_straggler_excess_seconds{" not in heard.registry.page().decode()
    assert len(heard.events) == 1


def test_nobody_is_compared_with_ranks_that_do_not_say() -> None:
    heard = Heard()
    watch = SlowRanks(heard.tell, heard.event, pause=0.0)
    for beats in ([], [SLOW], [SLOW, replace(BEAT, own=None)]):
        watch.look(beats)
    assert heard.page.rows == [] and heard.events == []
