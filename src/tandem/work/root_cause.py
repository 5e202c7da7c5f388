"""Root-cause attribution for script failures: own error, killed by a signal, or lost peers.

A script exits with 1 both for its own bug and for "my peer is gone". tandem's runner inside the rank
recognizes the error of a lost peer and exits with 200. The rest follows from who ended first and who was
killed. Pure functions. See docs/architecture.md#user-scripts.
"""

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import FINISHED, PEER_LOST, STOPPED, RunFailedError, is_own, shell_code, was_killed
from tandem.log import printable
from tandem.rotation import tail
from tandem.telemetry.messages import checked

LINES_SHOWN = 12
LINE_CHARACTERS = 1000
TASK_FAILED = "the task failed: "
NO_ERROR = re.compile(r"\d\d:\d\d:\d\d (node|rank) \d+ \| (?!error: )")
"""A line of tandem's own log below the level of an error."""
WHOSE = re.compile(r"^(\[rank\d+\]: )?(tandem\.[\w.]+Error: )?")
"""What torch and a traceback put before an error's message."""

ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit)(: |$)")
"""The start of the last line of a Python traceback."""


def failures(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return {local rank: code} of the ranks that ended with anything but success or a requested stop."""
    return {rank: code for rank, code in codes.items() if code not in (None, FINISHED, STOPPED)}


def signal_name(code: int) -> str:
    """Return the name of the signal behind a shell exit code: SIGKILL for 137."""
    try:
        # Most real-time signals have no name.
        return signal.Signals(code - 128).name
    except ValueError:
        return f"signal {code - 128}"


def choose(first: Mapping[int, int], later: Mapping[int, int]) -> tuple[int, int]:
    """Return the (local rank, code) that explains the end of a generation.

    Killed ranks come before failed ones, and those seen `first` before the `later` ones. Ranks that only lost
    their peers explain nothing unless there are no others.
    """
    # A rank killed first may have made the others fail; one killed later is a consequence.
    for group in (first, later):
        for explains in (was_killed, is_own):
            for rank, code in group.items():
                if explains(code):
                    return rank, code
    return next(iter({**first, **later}.items()))


@dataclass(frozen=True)
class Cause:
    """Why a generation ended: the responsible rank, its exit code, and the last lines of its output."""

    rank: int
    node: int
    node_name: str
    code: int
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f"rank {self.rank} on node {self.node} ({self.node_name})"
        if was_killed(self.code) and not (self.lines and is_of_tandem(self.lines[-1])):
            return f"{who} was killed ({signal_name(self.code)})"
        if self.code == PEER_LOST:
            return f"{who} lost its peers"
        return f"{who} ended with {self.code}"

    def in_one_line(self) -> str:
        """Return the cause on one line, with the rank's error if its last line has one."""
        last = self.lines[-1] if self.lines else ""
        error = WHOSE.sub("", last)
        return f"{self}: {error}" if is_of_tandem(last) or ERROR.match(error) else str(self)

    def with_traceback(self) -> str:
        """Return the cause with the last lines of the rank's traceback below it."""
        return "\n  ".join([f"{self}{':' if self.lines else ''}", *self.lines])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Cause":
        """Parse the output of `to_json`.

        Raises ValueError for anything else: any client of the store can write there.
        """
        try:
            words = json.loads(text)
            lines = tuple(_printable(line) for line in words["lines"])[:LINES_SHOWN]
            return checked(cls, {**words, "node_name": _printable(words["node_name"]), "lines": lines})
        # Deeply nested JSON raises RecursionError.
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"no cause: {type(error).__name__}") from error


def _printable(text: str) -> str:
    return printable(text)[:LINE_CHARACTERS]


def is_of_tandem(line: str) -> bool:
    """Return whether this is the last line of the traceback of an error of tandem."""
    found = WHOSE.match(line)
    return found is not None and found[2] is not None


def last_words(error_file: Path, log: Path) -> tuple[str, ...]:
    """Return the last lines of a rank's traceback file, or else of its log, without the ~~^^ markers."""
    try:
        message = json.loads(error_file.read_text())["message"]
        # The format of torch's error handler (TORCHELASTIC_ERROR_FILE).
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else str(message)
    except (OSError, ValueError, KeyError, TypeError):
        try:
            text = tail(log, 4000)[0].decode(errors="replace")
        except OSError:
            return ()
    # Tracebacks underline the failing expression; such a line would take the room of one with words.
    return tuple(line for line in text.splitlines() if line.strip(" ~^"))[-LINES_SHOWN:]


def run_failed(exitcode: int, lines: Iterable[str]) -> RunFailedError:
    """Return the error for a launch that ended with `exitcode`, with the reason from its output.

    A negative `exitcode` is a signal's number, as in subprocess.
    """
    code = shell_code(exitcode)
    return RunFailedError(last_error([line for line in lines if line.strip()]) or f"exit code {code}", code)


def last_error(lines: Sequence[str]) -> str:
    """Return why a run failed, on one line: its last error, or the end of a script's traceback.

    A script's agent logs last which exit code ended the script. Rank 0's own output is just above that line,
    and another rank's is below it.
    """
    last = next((n for n in reversed(range(len(lines))) if "error: " in lines[n]), len(lines) - 1)
    if lines and "error: ended with code " in lines[last]:
        own = (lines[last + 1 :] or lines[:last])[-1:]
        if own and not NO_ERROR.match(own[0]):
            return WHOSE.sub("", own[0].rpartition("| error: ")[2].strip())
    # A task's error is logged with a few lines of traceback; the line after them has the error's message.
    failed = next((line for line in lines[last:] if line.startswith(TASK_FAILED)), None)
    if failed is not None:
        return failed.removeprefix(TASK_FAILED)
    return lines[last].partition("error: ")[2] or lines[last].removeprefix("tandem: ") if lines else ""
