"""How long a stop between two generations waits for the chance to save."""


from types import SimpleNamespace
from typing import Any

import pytest

from tandem import running_clock
from tandem.launch.shutdown import is_time_to_save
from tandem.timeouts import MEET_TO_SAVE_SECONDS


def node(ago: float | None, interrupts: int = 0, shutdown_timeout: float = 25.0) -> Any:
    stop = SimpleNamespace(at=None if ago is None else running_clock.now() - ago, interrupts=interrupts)
    return SimpleNamespace(stop=stop, config=SimpleNamespace(shutdown_timeout=shutdown_timeout))


@pytest.mark.parametrize(
    ("asked", "has_trained", "waits", "expected"),
    [
        ({"ago": None}, True, None, False),
        ({"ago": 0.1}, True, None, True),
        ({"ago": 0.1}, False, None, False),  # nothing is in memory
        ({"ago": 0.1, "interrupts": 2}, True, None, False),  # a second Ctrl-C
        ({"ago": 26.0}, True, None, False),
        ({"ago": 3.0, "shutdown_timeout": 2.0}, True, None, False),
        ({"ago": 0.1}, True, 60.0, True),  # it has waited for long, and was asked just now
        ({"ago": MEET_TO_SAVE_SECONDS + 1}, True, 0.1, True),
        ({"ago": MEET_TO_SAVE_SECONDS + 1}, True, MEET_TO_SAVE_SECONDS + 1, False),  # the others do not come
    ],
)
def test_ranks_start_once_more_while_there_is_time(
    asked: dict[str, Any], has_trained: bool, waits: float | None, expected: bool
) -> None:
    since = None if waits is None else running_clock.now() - waits
    assert is_time_to_save(node(**asked), has_trained, since) is expected
