"""Why a run that somebody watches has failed, in one line."""

import pytest

from tandem.work.base import last_error


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["tandem: unknown task 'nope': valid are digits"], "unknown task 'nope': valid are digits"),
        (["12:00:00 node 0 | a word", "12:00:01 rank 0 | error: no more memory"], "no more memory"),
        (["Traceback (most recent call last):", "ValueError: 3"], "ValueError: 3"),
    ],
)
def test_it_is_said_once_and_without_the_name_of_the_program(lines: list[str], words: str) -> None:
    """`tandem verify-resume` puts its own name before it: it was there twice."""
    assert last_error(lines) == words
