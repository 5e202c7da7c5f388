"""What a rank says to its node's agent: one dataclass per kind, declared here, and how it travels.

A message is a JSON object whose `is` names the class. An agent of another version may say more or less:
unknown keys are left alone; what does not fit its class is refused by `decode`.
"""

import functools
import json
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tandem.telemetry.families import Sample


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is, several times a second. `quiet`: seconds since it entered `phase`; `idle`: since it
    has shown work there. Both are of the time in which it ran.

    `limit` and `idle_limit` are what those may be, and `hang` what silence may; `trained`: it has finished a
    step; `waiting`: it stands in a collective. Of a script, which gathers nothing by itself, `own` and
    `quick` are a typical and a quick step without the wait for other ranks, and `doing` the line where most
    of that time goes; None as long as it is not known.
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
    """The plan, by rank 0: training goes on after `step` finished steps."""

    step: int
    steps_per_epoch: int
    steps_planned: int


@dataclass(frozen=True)
class StepsDone:
    """How far rank 0 is; `loss` is the last interval's, None before the first and when it is not finite."""

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
    """The slowest ranks of the last interval for the page, and who holds the others back, if anybody."""

    rows: list[dict[str, Any]]
    says: str | None


@dataclass(frozen=True)
class Samples:
    """Changes of metrics, see `Registry.apply`."""

    samples: list[Sample]


Message = Heartbeat | RunStarted | StepsDone | Point | Event | Ranks | Samples
Send = Callable[[Message], object]
MAX_NODE_BYTES = 256 * 1024
"""As much as 64 series of every metric that a node has of its own."""
Declared = TypeVar("Declared")
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One datagram. NaN travels as Python's JSON spells it. Raises TypeError for what JSON cannot hold."""
    return json.dumps({"is": type(message).__name__, **vars(message)}, separators=(",", ":")).encode()


def decode(datagram: bytes) -> Message:
    """What `encode` was given. Raises ValueError for anything else."""
    words = json.loads(datagram)
    kind = KINDS.get(str(words.get("is"))) if isinstance(words, dict) else None
    if kind is None:
        raise ValueError("no message of a known kind")
    return checked(kind, words)


def checked(kind: type[Declared], words: object) -> Declared:
    """A dataclass from what came as JSON, each field of the type that is declared. Raises ValueError."""
    if not isinstance(words, dict):
        raise ValueError(f"{kind.__name__} that is no object")
    values = {}
    for name, hint, types_of_it in _declared(cast(Any, kind)):
        value = values[name] = words.get(name)
        if type(value) not in types_of_it and not _fits(value, hint):
            raise ValueError(f"{kind.__name__} with a strange {name}")
    return kind(**values)


@functools.cache
def _declared(kind: type[Any]) -> tuple[tuple[str, Any, tuple[type, ...]], ...]:
    """(name, hint, types that fit at once) of each field.

    Node 0 checks five times a second what all ranks say; to resolve hints each time took ten times as long.
    """
    hints = get_type_hints(kind)
    return tuple((each.name, hints[each.name], _plain(hints[each.name])) for each in fields(cast(Any, kind)))


def _plain(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(each for part in get_args(hint) for each in _plain(part))
    return {int: (int,), float: (int, float)}.get(hint, (hint,) if hint in (str, bool, type(None)) else ())


def pack_samples(samples: list[Sample]) -> str:
    """What a node's agent says to node 0 of its own metrics: whole, with a number that makes it new."""
    data = json.dumps([time.monotonic_ns(), samples], separators=(",", ":"))
    return data if len(data) <= MAX_NODE_BYTES else "[0,[]]"


def unpack_samples(data: bytes) -> list[Any]:
    """What `pack_samples` was given; a row that `Registry` counts as an error if it is anything else."""
    try:
        _, samples = json.loads(data[: MAX_NODE_BYTES + 1])
        return samples if isinstance(samples, list) else [None]
    except (ValueError, TypeError, RecursionError):
        return [None]


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if get_origin(hint) is list:
        item = dict if get_origin(get_args(hint)[0]) is dict else list
        return isinstance(value, list) and all(isinstance(each, item) for each in value)
    return isinstance(value, get_origin(hint) or hint)
