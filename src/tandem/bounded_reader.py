"""Read the files of a run directory: one bounded, typed reader that trusts no file.

A run directory may come from an archive, a shared volume or a stranger. Only regular files are opened, and no
link is followed below the directory. Bytes, depth and items have limits. Bytes that are not UTF-8 are
replaced. Each file declares the types of its fields. What does not fit is left out and becomes a problem, a
phrase that a command prints. Standard library only.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, BinaryIO, NoReturn, TypeVar

from tandem import layout

RECORD_BYTES = 4 * 2**20
"""The limit of a file that is read whole, as JSON or text; a hundred times a normal size."""
TAIL_BYTES = 4 * 2**20
"""How much of the end of a JSON-lines file is read; more than `rotation.EVENTS_BYTES`."""
LINE_BYTES = 2**20
MOST_LINES = 50_000
MOST_STRAY_LINES = 10_000
DEEPEST = 16
MOST_ITEMS = 200_000
LARGEST = 2**63
LONGEST_TEXT = 64 * 1024
LATEST = 253_402_300_800.0
"""Unix seconds of the year 10000, the first that a date cannot represent."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not have, as `journal.plain` writes them."""
KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# O_PATH: a directory on the way needs no read permission. O_NONBLOCK: opening a pipe without a writer would
# block. O_NOCTTY: a terminal must not become this process's own.
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

T = TypeVar("T")
StrPath = str | os.PathLike[str]
Type = Callable[[object], object]
"""Return the value in this type. Raises ValueError, TypeError or OverflowError for any other value."""


def anything(value: object) -> object:
    """Accept any JSON: text becomes printable, and numbers get a size that every reader can format."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -LARGEST < value < LARGEST else float(value)
    if isinstance(value, dict):
        return {text(name): anything(item) for name, item in value.items()}
    return [anything(item) for item in value] if isinstance(value, list) else value


def text(value: object) -> str:
    """Return text without unpaired surrogates, which cannot be printed."""
    if not isinstance(value, str):
        raise TypeError("not text")
    return value[:LONGEST_TEXT].encode("utf-8", "replace").decode()


def count(value: object) -> int:
    """Accept a natural number of 63 bits."""
    # True is an int in Python, but no count.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise TypeError("not a count")
    return value


def number(value: object) -> int | float:
    """Accept any number, also one that is not finite."""
    if isinstance(value, str):
        return NOT_FINITE.get(value) or _wrong(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return value if isinstance(value, float) or -LARGEST < value < LARGEST else float(value)


def finite(value: object) -> int | float:
    """Accept a finite number."""
    found = number(value)
    return found if math.isfinite(found) else _wrong(found)


def moment(value: object) -> float:
    """Accept Unix seconds that a date can represent."""
    found = float(number(value))
    return found if 0 <= found < LATEST else _wrong(found)


def table_of(kind: Callable[[object], T]) -> Callable[[object], dict[str, T]]:
    """Return a type for objects; items of another type are left out."""

    def table(value: object) -> dict[str, T]:
        if not isinstance(value, dict):
            raise TypeError("not an object")
        found: dict[str, T] = {}
        for name, item in value.items():
            with suppress(ValueError, TypeError, OverflowError):
                found[text(name)] = kind(item)
        return found

    return table


def list_of(kind: Type) -> Type:
    """Return a type for lists of this type only."""

    def listed(value: object) -> list[object]:
        if not isinstance(value, list):
            raise TypeError("not a list")
        return [kind(item) for item in value]

    return listed


def _wrong(value: object) -> NoReturn:
    raise ValueError(value)


@dataclass(frozen=True)
class JsonShape:
    """The types of an object's fields. Null counts as missing, except for `required` fields.

    `others`: the type of fields that are not named; None leaves them out.
    """

    fields: Mapping[str, Type] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Type | None = anything


numbers = table_of(number)
SUMMARY = JsonShape({
    "state": text, "reason": text, "task": text, "platform": text, "weights_sha256": text,
    "optimizer": text, "schedule": text, "verdict": text,
    "exit_code": count, "world_size": count, "nodes": count,
    "global_step": count, "samples_seen": count, "restarts": count, "planned_stops": count,
    "resumed_from_step": count, "last_checkpoint_step": count, "epoch": number, "loss": number, "lr": number,
    "samples_per_second": number, "wall_seconds": number, "eval": numbers,
})  # fmt: skip
CONFIG = JsonShape({"run_dir": text, "task": text, "tracker": text, "log_format": text})
ABOUT = JsonShape(
    {
        "started": moment, "command": text, "folder": text, "commit": text, "versions": table_of(text),
        "hardware": list_of(text),
    },
    others=None,
)  # fmt: skip
EVENT = JsonShape(
    {
        "time": moment, "kind": text, "step": count, "rank": count, "node": count, "number": count,
        "nodes": count, "world_size": count, "exit_code": count, "bytes": finite, "seconds": finite,
        "steps_lost": finite, "own_seconds": finite, "median_seconds": finite, "reason": text,
        "problem": text, "signal": text, "phase": text, "place": text,
    },
    frozenset({"kind"}),
)  # fmt: skip
POINT = JsonShape(
    {"step": count, "time": moment, "eval": numbers, "scores": numbers, "phases": numbers},
    frozenset({"step"}),
    others=number,
)
PERIOD = JsonShape(
    {"launch": moment, "began": moment, "seconds": table_of(finite), "first": count, "last": count,
     "stalled": finite, "data": finite, "stragglers": finite, "end": text},
    frozenset({"launch", "began", "seconds"}),
)  # fmt: skip
STARTS = JsonShape(
    {"starts": count, "step": count, "reason": text}, frozenset({"starts", "step", "reason"}), others=None
)
MARK = JsonShape(
    {"ours": text, "run": text, "step": lambda value: value if value == -1 else count(value), "rows": count,
     "sent": count},
    frozenset({"ours"}),
    others=_wrong,
)  # fmt: skip
SHAPES = {
    layout.CONFIG: CONFIG,
    layout.SUMMARY: SUMMARY,
    layout.ABOUT: ABOUT,
    layout.TRACKER: JsonShape(),
    layout.METRICS: POINT,
    layout.EVENTS: EVENT,
    layout.GOODPUT: PERIOD,
    layout.EVENTS + layout.OLDER: EVENT,
}


def opened(folder: StrPath, name: str) -> BinaryIO:
    """Open the file of `descriptor`."""
    return os.fdopen(descriptor(folder, name), "rb")


def descriptor(folder: StrPath, name: str) -> int:
    """Open a regular file below `folder` for reading; `name` may contain directories, but no links.

    `folder` itself is as the user typed it and may be a link. Raises OSError: FileNotFoundError if it is
    missing, EBADMSG if it is not a file.
    """
    *inner, last = PurePath(name).parts
    at = os.open(folder, _DIRECTORY)
    try:
        for each in inner:
            _check_kind(at, each, stat.S_IFDIR)
            below = os.open(each, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        _check_kind(at, last, stat.S_IFREG)  # opening some devices has side effects
        found = os.open(last, _FILE, dir_fd=at)
    finally:
        os.close(at)
    # Another process may have replaced the file after it was checked by name.
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EBADMSG, f"{last} is not a file")


def _check_kind(at: int, name: str, wanted: int) -> None:
    kind = stat.S_IFMT(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    if kind != wanted:
        raise OSError(errno.EBADMSG, f"{name} is {KINDS.get(kind, 'no file')}")


def content(folder: StrPath, name: str, limit: int = RECORD_BYTES) -> bytes:
    """Return the content of a small file. Raises OSError, also if it is larger than `limit`."""
    with opened(folder, name) as file:
        # One byte more shows that it is too large, even if it grows at the moment.
        found = file.read(limit + 1)
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"{name} has more than {limit:,} bytes")
    return found


def parsed(raw: bytes) -> Any:
    """Parse JSON within the limits. Raises ValueError with what is wrong."""
    # Counted before parsing, because parsed items take many times the memory of their text.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_ITEMS:
        raise ValueError(f"has more than {MOST_ITEMS:,} items")
    try:
        found = json.loads(raw.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError(f"is nested deeper than {DEEPEST} levels") from None
    except ValueError:
        raise ValueError("is not JSON") from None
    if is_deep(found):
        raise ValueError(f"is nested deeper than {DEEPEST} levels")
    return found


def is_deep(value: object) -> bool:
    """Return whether a value is nested more than DEEPEST levels deep."""
    # One level after another: recursion would fail at the depth that it is to find.
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def typed(value: object, shape: JsonShape) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of the right type, and the names of the others.

    Raises ValueError if it is no such object.
    """
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    found: dict[str, Any] = {}
    left_out = []
    for key, item in value.items():
        kind, name = shape.fields.get(key, shape.others), text(key)
        if kind is None:
            continue
        try:
            found[name] = None if item is None and key not in shape.required else kind(item)
        except (ValueError, TypeError, OverflowError):
            left_out.append(name)
    if not shape.required <= found.keys():
        raise ValueError(f"has no {', '.join(sorted(shape.required - found.keys()))}")
    return found, left_out


class RunFiles:
    """The files of the run in `folder`. An unreadable file counts as missing and is listed in `problems`."""

    def __init__(self, folder: StrPath) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, with the types of SHAPES; empty if there is none."""
        try:
            found, left_out = typed(parsed(content(self._folder, name)), SHAPES[name])
        except OSError as error:
            self._note(name, error)
            return {}
        except ValueError as error:
            self.problems.append(f"{name} {error}")
            return {}
        if left_out:
            shown = ", ".join(each[:40] for each in left_out[:3])
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            self.problems.append(f"{name} has a value of the wrong type: {shown}{more}")
        return found

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects at the end of a JSON-lines file; torn lines and other values are left out."""
        try:
            with opened(self._folder, name) as file:
                found = _last_lines(file)
        except OSError as error:
            self._note(name, error)
            return
        stray = 0
        for line in found:
            try:
                record = typed(parsed(line), SHAPES[name])[0] if line[:1] == b"{" else _wrong(line)
            except ValueError:
                stray += 1
                # Lines of nonsense must not keep a reader busy.
                if stray > MOST_STRAY_LINES:
                    self.problems.append(f"{name} has more than {MOST_STRAY_LINES:,} stray lines")
                    return
                continue
            yield record

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of events.jsonl, after those of the older file if there is one."""
        older = layout.EVENTS + layout.OLDER
        # A kill during the rotation leaves both names for one file.
        if not self._is_one(layout.EVENTS, older):
            yield from self.lines(older)
        yield from self.lines(layout.EVENTS)

    def text(self, name: str) -> str:
        """Return the content of a small text file; empty if there is none."""
        try:
            return content(self._folder, name).decode("utf-8", "replace")
        except OSError as error:
            self._note(name, error)
            return ""

    def _is_one(self, *names: str) -> bool:
        with suppress(OSError):
            facts = [os.stat(os.path.join(self._folder, name), follow_symlinks=False) for name in names]
            return os.path.samestat(*facts)
        return False

    def _note(self, name: str, error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return
        is_ours = error.errno in (errno.EBADMSG, errno.EFBIG)
        self.problems.append(str(error.strerror) if is_ours else f"{name}: {error.strerror or error}")


def _last_lines(file: BinaryIO) -> list[bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    lines = file.read(TAIL_BYTES).splitlines()
    # The read began within a line.
    whole = lines[1:] if size > TAIL_BYTES else lines
    return [line for line in whole[-MOST_LINES:] if 1 < len(line) <= LINE_BYTES]
