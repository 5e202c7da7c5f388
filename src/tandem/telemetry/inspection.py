"""Answer an agent's requests in a rank: its stacks, a profile of the next steps, its memory.

A request arrives on the pipe from the agent (`script/lifeline.py`), in every kind of workload. The answer is
a file in a directory that the agent names, because it may be large, and no rank must wait for a reader. See
docs/architecture.md#looking-inside-a-run.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.telemetry import profiling
from tandem.telemetry.messages import checked
from tandem.telemetry.stacks import thread_stacks

ACTIONS = ("stacks", "profile", "memory")
CANCEL = "cancel"
"""Ends a rank's recording; only ranks get it."""


@dataclass(frozen=True)
class Request:
    """A request of node 0 to all ranks.

    `options` by action: `first` and `steps` (profile), `seconds` (memory). `limit`: the seconds after which
    node 0 stops waiting.
    """

    id: str
    action: str
    limit: float
    options: dict[str, float]


@dataclass
class Answer:
    """A rank's answer: its `facts`, or an `error` of one line. `file` is the name of a file next to it."""

    rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    file: str | None = None


def answer_path(folder: Path, request: str, rank: int) -> Path:
    return folder / f"{request}-{rank}.json"


def to_rank(request: Request, rank: int, folder: Path) -> bytes:
    """Encode a request for the pipe of one rank, which answers in `folder`."""
    return json.dumps({**asdict(request), "rank": rank, "folder": str(folder)}).encode()


def handle(message: bytes) -> None:
    """Answer a request from the pipe; a malformed one is dropped. Never raises, and never waits."""
    try:
        words = json.loads(message)
        request = checked(Request, words)
        rank = int(words["rank"])
        folder = Path(words["folder"])
    except (ValueError, TypeError, KeyError):
        return

    def answer(facts: Mapping[str, Any], error: str | None = None, file: Path | None = None) -> None:
        write_answer(folder, request.id, Answer(rank, dict(facts), error, file.name if file else None))

    if request.action == CANCEL:
        profiling.cancel()
    # Answer at once: a new thread may not start in a process that is short of memory or threads.
    if request.action == "stacks":
        _reporting(lambda: answer({"threads": thread_stacks()}), answer)
    elif request.action == "profile":
        path = folder / f"{request.id}-{rank}.trace"
        _reporting(lambda: profiling.ask(request.options, path, answer), answer)
    elif request.action == "memory":
        # Use a new thread, because this one must notice the end of the pipe meanwhile.
        threading.Thread(
            target=_reporting,
            args=(lambda: measure_memory(request, folder / f"{request.id}-{rank}.memory", answer), answer),
            name="tandem-inspection",
            daemon=True,
        ).start()


def measure_memory(request: Request, path: Path, answer: Callable[..., None]) -> None:
    """Measure the memory; its module is imported only now, because few ranks ever need it."""
    from tandem.telemetry.memory_use import measure

    measure(request.options, path, answer)


def _reporting(run: Callable[[], None], answer: Callable[[Mapping[str, Any], str], None]) -> None:
    try:
        run()
    except Exception as error:  # training continues, whatever error the inspection met
        try:
            answer({}, f"{type(error).__name__}: {error}")
        except OSError:  # the agent's directory is full or gone, so no answer can reach it
            pass


def write_answer(folder: Path, request: str, answer: Answer) -> None:
    """Write an answer in one piece, so that its reader never sees a part. Raises OSError."""
    path = answer_path(folder, request, answer.rank)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(answer)))
    temporary.replace(path)
