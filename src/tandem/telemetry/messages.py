"""The messages from a rank to its node's agent: one dataclass per kind, and their encoding.

A message is a JSON object whose key `is` names the class. An agent of another version may send more or fewer
keys: unknown keys are ignored, and `decode` rejects what does not fit its class.
"""

import functools
import json
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tandem.telemetry.metrics import Sample


@dataclass(frozen=True)
class Heartbeat:
    """The position of a rank, sent several times a second.

    `quiet` is the number of seconds since it entered `phase`, and `idle` since it last showed work there;
    both exclude time in which the process was stopped. `limit` and `idle_limit` are their limits, and `hang`
    that of silence. `trained`: it has finished a step. `waiting`: it is in a collective.

    A script's ranks gather no step times. For them, `own` and `quick` are a typical and a quick step without
    the wait for other ranks. `doing` is the source line where most of that time is spent. All three are None
    while unknown.
    """

    rank: int
    step: int
    activity: str
    phase: str
    quiet: float
    limit: float
    hang: float
    trained: bool
    waiting: bool
    idle: float = 0.0
    idle_limit: float = inf
    own: float | None = None
    quick: float | None = None
    doing: str | None = None


@dataclass(frozen=True)
class RunStarted:
    """The plan, sent by rank 0: training continues after `step` finished steps."""

    step: int
    steps_per_epoch: int
    steps_planned: int


@dataclass(frozen=True)
class StepsDone:
    """Rank 0's progress; `loss` is the last interval's, None before the first and if it is not finite."""

    step: int
    loss: float | None
    samples_per_second: float


@dataclass(frozen=True)
class Point:
    """A line of metrics.jsonl, for the curves."""

    step: int
    time: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl."""

    kind: str
    time: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Ranks:
    """The slowest ranks of the last interval for the page, and a message about a straggler, if any."""

    rows: list[dict[str, Any]]
    says: str | None


@dataclass(frozen=True)
class Samples:
    """Changes of metrics, see `Registry.apply`."""

    samples: list[Sample]


Message = Heartbeat | RunStarted | StepsDone | Point | Event | Ranks | Samples
Send = Callable[[Message], object]
MAX_NODE_BYTES = 256 * 1024
"""Enough for 64 series of every metric that is kept per node."""
Declared = TypeVar("Declared")
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode one datagram, with NaN as in Python's JSON. Raises TypeError for what JSON cannot hold."""
    # Without spaces, because a datagram has at most 64 KiB (channel.MAX_MESSAGE_BYTES).
    return json.dumps({"is": type(message).__name__, **vars(message)}, separators=(",", ":")).encode()


def decode(datagram: bytes) -> Message:
    """Inverse of `encode`. Raises ValueError for anything else."""
    words = json.loads(datagram)
    kind = KINDS.get(str(words.get("is"))) if isinstance(words, dict) else None
    if kind is None:
        raise ValueError("no message of a known kind")
    return checked(kind, words)


def checked(kind: type[Declared], words: object) -> Declared:
    """Return a dataclass from JSON, with each field of its declared type. Raises ValueError."""
    if not isinstance(words, dict):
        raise ValueError(f"{kind.__name__} that is no object")
    values = {}
    for name, hint, types_of_it in _declared(cast(Any, kind)):
        value = values[name] = words.get(name)
        # The exact type is the common case, and cheaper to check.
        if type(value) not in types_of_it and not _fits(value, hint):
            raise ValueError(f"{kind.__name__} with a strange {name}")
    return kind(**values)


@functools.cache
def _declared(kind: type[Any]) -> tuple[tuple[str, Any, tuple[type, ...]], ...]:
    """Return (name, hint, types that fit exactly) of each field.

    It is cached because node 0 checks the messages of all ranks five times a second; resolving the hints each
    time took ten times as long.
    """
    hints = get_type_hints(kind)
    return tuple((each.name, hints[each.name], _plain(hints[each.name])) for each in fields(cast(Any, kind)))


def _plain(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(each for part in get_args(hint) for each in _plain(part))
    return {int: (int,), float: (int, float)}.get(hint, (hint,) if hint in (str, bool, type(None)) else ())


def pack_samples(samples: list[Sample]) -> str:
    """Encode all metrics that an agent sends to node 0, with a number that changes each time."""
    data = json.dumps([time.monotonic_ns(), samples], separators=(",", ":"))
    # Node 0 would cut a longer row, and count an error in every round.
    return data if len(data) <= MAX_NODE_BYTES else "[0,[]]"


def unpack_samples(data: bytes) -> list[Any]:
    """Inverse of `pack_samples`; for anything else, a row that `Registry` counts as an error."""
    try:
        _, samples = json.loads(data[: MAX_NODE_BYTES + 1])
        return samples if isinstance(samples, list) else [None]
    except (ValueError, TypeError, RecursionError):
        return [None]


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint in (int, float):
        # Python's bool is a subclass of int.
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if get_origin(hint) is list:
        # JSON has no tuples, so a Sample arrives as a list.
        item = dict if get_origin(get_args(hint)[0]) is dict else list
        return isinstance(value, list) and all(isinstance(each, item) for each in value)
    return isinstance(value, get_origin(hint) or hint)
