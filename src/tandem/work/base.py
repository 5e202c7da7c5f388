"""Define `Workload`, the interface through which the agent runs a task or a program.

The agent itself imports no task, data or training code. See docs/architecture.md#workloads.
"""

import json
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.checkpoint.decision import ResumeDecision
from tandem.code_files import CodeFile
from tandem.distributed.position import Grant, Position, RankStart
from tandem.errors import FINISHED, PEER_LOST, STOPPED, RunFailedError, is_own, shell_code, was_killed
from tandem.log import printable
from tandem.platforms.detection import Placement
from tandem.rotation import tail
from tandem.signals import StopFlag
from tandem.telemetry.messages import checked

# Root-cause attribution for script failures: own error, killed by a signal, or lost peers.
#
# A script exits with 1 both for its own bug and for "my peer is gone". tandem's runner inside the rank
# recognizes the error of a lost peer and exits with 200. The rest follows from which rank ended first and
# which was killed. Pure functions. See docs/architecture.md#user-scripts.

LINES_SHOWN = 12
LINE_CHARACTERS = 1000
TASK_FAILED = "the task failed: "
NO_ERROR = re.compile(r"\d\d:\d\d:\d\d (node|rank) \d+ \| (?!error: )")
"""A line of tandem's own log below the level of an error."""
WHOSE = re.compile(r"^(\[rank\d+\]: )?(tandem\.[\w.]+Error: )?")
"""Prefixes of torch and of a traceback before an error's message."""

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


def choose_cause(first: Mapping[int, int], later: Mapping[int, int]) -> tuple[int, int]:
    """Return the (local rank, code) that explains the end of a generation.

    Killed ranks come before failed ones, and those seen `first` before the `later` ones. Ranks that only lost
    their peers count only if there are no others.
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
        if was_killed(self.code) and not (self.lines and is_tandem_error(self.lines[-1])):
            return f"{who} was killed ({signal_name(self.code)})"
        if self.code == PEER_LOST:
            return f"{who} lost its peers"
        return f"{who} ended with {self.code}"

    def in_one_line(self) -> str:
        """Return the cause on one line, with the rank's error if its last line has one."""
        last = self.lines[-1] if self.lines else ""
        error = WHOSE.sub("", last)
        return f"{self}: {error}" if is_tandem_error(last) or ERROR.match(error) else str(self)

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


def is_tandem_error(line: str) -> bool:
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
    # Tracebacks underline the failing expression; such lines would replace more useful ones.
    return tuple(line for line in text.splitlines() if line.strip(" ~^"))[-LINES_SHOWN:]


def run_failed(exitcode: int, lines: Iterable[str]) -> RunFailedError:
    """Return the error for a launch that ended with `exitcode`, with the reason from its output.

    A negative `exitcode` is a signal's number, as in subprocess.
    """
    code = shell_code(exitcode)
    return RunFailedError(last_error([line for line in lines if line.strip()]) or f"exit code {code}", code)


def last_error(lines: Sequence[str]) -> str:
    """Return why a run failed, on one line: its last error, or the end of a script's traceback.

    The last line of a script's agent has the script's exit code. Rank 0's own output is just above that line,
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


PROGRESS = NOTHING, SAVED, TRAINED = "nothing", "saved", "trained"
"""The state that a generation can resume from.

None, the checkpoint that it began with, or newer state in node 0's memory, which a stop must not lose.
"""


@dataclass(frozen=True)
class GenerationEnd:
    """The end of a generation on this node, and the evidence to explain it.

    `codes`: the ranks' exit codes by local rank, None for a running rank; `now` returns the current ones.
    `blamed` waits briefly for the rank that made the others fail, and returns all failures.
    `is_forwarded`: the agent has forwarded a stop. `last_words`: the report of the first rank that failed.
    `store`: the agents' store, in which the generation's keys start with `prefix`.
    """

    codes: Mapping[int, int | None]
    now: Callable[[], Mapping[int, int | None]]
    blamed: Callable[[], dict[int, int]]
    positions: Mapping[int, Position]
    prefix: str
    grant: Grant
    nodes: int
    stop: StopFlag
    is_forwarded: bool
    last_words: str
    store: Any


RankFunction = Callable[[Any, RankStart], int]
"""(job, the rank's start) -> exit code."""
WarmUp = Callable[[Any, RankStart | None], None]
"""(job, the start that the rank will most likely get, if known) -> None."""


class Workload(Protocol):
    """The workload of a node's ranks: a task or a program.

    A rank calls `rank_entry`, and a standby process first calls `warm_up`; both receive `job`. The agent does
    not import the ranks' code: both functions import it in the rank's process. The fork server imports
    `preload` before it forks the first rank. `words`: the workload on the command line of a simulated node.
    `standby_key` maps a rank's position to the key of its standby processes (see `Workers`).
    """

    rank_entry: RankFunction
    warm_up: WarmUp
    job: Any
    preload: Sequence[str]
    words: Sequence[str]
    standby_key: Callable[[Any], object]

    saves: bool
    """Whether tandem saves the ranks' state, in the node's memory and as checkpoints.

    If not, only the ranks know what is saved, and starting them once more saves nothing.
    """
    has_own_store: bool
    """Whether the ranks of each generation connect through a new, separate store (`env://`)."""
    logs_errors: bool
    """Whether rank 0 logs an error that ends it, so that its agent need not."""
    charges_all: bool
    """Whether every restart counts on every node."""

    def check(self, placement: Placement, gpus: Callable[[], Sequence[str]]) -> None:
        """Reject a workload that cannot run here, before anything starts. `gpus` lists this machine's GPUs.

        Raises ConfigError.
        """

    def prepare(self, placement: Placement) -> ResumeDecision | None:
        """Check for mistakes before any rank starts; on node 0, also decide where the run resumes.

        Returns None if the ranks decide by themselves. Raises TandemError.
        """

    def standby_code(self) -> object:
        """Return the state of the files that standby processes import, to compare with `==`."""

    def code(self) -> Mapping[str, CodeFile]:
        """Return the files of the ranks' code that this process knows, as they were when they were read."""

    def progress(self, has_trained: bool, resume: ResumeDecision) -> str:
        """Return what the run resumes from, one of PROGRESS; `has_trained`: a rank has reported its plan."""

    def is_done(self) -> bool:
        """Return whether a job result of 0 is plausible, as node 0 sees the run."""

    def is_retried(self, code: int) -> bool:
        """Return whether ranks are restarted after this exit code."""

    def explain(self, end: GenerationEnd) -> tuple[int, Cause | None]:
        """Return the node's exit code after a rank failed or all ended, and the cause if there is one."""

    def last_line(self, code: int, restarts: int) -> str:
        """Return node 0's last line about a run that ended with `code`; "" if the ranks have printed it."""


def rank_identity(position: Position | None) -> tuple[int, ...] | None:
    """Return the facts about its rank that a script may read at import: scripts' standby key."""
    if position is None:
        return None
    return position.rank, position.local_rank, position.world_size, position.nodes


def gpu_index(position: Position | None) -> int | None:
    """Return the number of a rank's GPU: a standby key for processes with an open CUDA context."""
    return None if position is None else position.local_rank


def any_rank(_position: Position | None) -> None:
    """Return the same key for every rank: a standby process may then become any rank."""
