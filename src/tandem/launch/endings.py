"""Who is to blame when ranks of a person's own program end: the bug, the killed, or the peers of either.

A program ends with 1 for its own bug and for "my peer is gone" alike. tandem's runner, inside the rank, knows
an error of a lost peer and ends with 200; the rest is told by who ended first and who was killed. Pure.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import FINISHED, PEER_LOST, STOPPED
from tandem.log import printable
from tandem.rotation import tail
from tandem.telemetry.messages import checked

LINES_SHOWN, LINE_CHARACTERS = 12, 1000


def failures(codes: Mapping[int, int | None]) -> dict[int, int]:
    """{local rank: code} of those that have ended in another way than well or as asked."""
    return {rank: code for rank, code in codes.items() if code not in (None, FINISHED, STOPPED)}


def was_killed(code: int) -> bool:
    """By a signal: 128+n, as a shell says it."""
    return 128 < code < PEER_LOST and code != STOPPED


def signal_name(code: int) -> str:
    """SIGKILL for 137."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return f"signal {code - 128}"


def is_own(code: int) -> bool:
    """The program's own: an error that it would have again."""
    return 0 < code < 128


def choose(first: Mapping[int, int], later: Mapping[int, int]) -> tuple[int, int]:
    """(local rank, code) that explains the end: of those seen first, the killed before the failed.

    Those that only lost their peers explain nothing, as long as there is anybody else.
    """
    for group in (first, later):
        for explains in (was_killed, is_own):
            for rank, code in group.items():
                if explains(code):
                    return rank, code
    return next(iter({**first, **later}.items()))


@dataclass(frozen=True)
class Cause:
    """Why a generation ended, for people: whose end it was and its last words."""

    rank: int
    node: int
    node_name: str
    code: int
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f"rank {self.rank} on node {self.node} ({self.node_name})"
        if was_killed(self.code):
            return f"{who} was killed ({signal_name(self.code)})"
        if self.code == PEER_LOST:
            return f"{who} lost its peers"
        return f"{who} ended with {self.code}"

    def told(self) -> str:
        """With the last lines of its traceback."""
        return "\n  ".join([f"{self}{':' if self.lines else ''}", *self.lines])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Cause":
        """Raises ValueError for what `to_json` has not given: anyone may have written it."""
        try:
            words = json.loads(text)
            lines = tuple(_printable(line) for line in words["lines"])[:LINES_SHOWN]
            return checked(cls, {**words, "node_name": _printable(words["node_name"]), "lines": lines})
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"no cause: {type(error).__name__}") from error


def _printable(text: str) -> str:
    return printable(text)[:LINE_CHARACTERS]


def last_words(error_file: Path, log: Path) -> tuple[str, ...]:
    """The last lines of a rank's traceback, as it was written down, else of its log."""
    try:
        message = json.loads(error_file.read_text())["message"]
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else str(message)
    except (OSError, ValueError, KeyError, TypeError):
        try:
            text = tail(log, 4000)[0].decode(errors="replace")
        except OSError:
            return ()
    return tuple(line for line in text.splitlines() if line.strip())[-LINES_SHOWN:]
