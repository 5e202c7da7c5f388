"""Follow files that grow and are rotated, line by line, and read the lines of tandem's logs."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tandem.bounded_reader import opened, parsed
from tandem.rotation import older

MOST_BYTES = 2**18
"""Limit for one read and for one request; a longer line is read in parts."""
LONGEST_BODY = 64 * 1024
LINE = re.compile(r"(\d\d):(\d\d):(\d\d) (node|rank) (\d+) \| (?:(debug|warning|error|critical): )?(.*)")
"""A line as `log.TextFormatter` writes it."""
DAY = timedelta(days=1)
SLACK = timedelta(minutes=1)


class Mark(NamedTuple):
    """How far a file has been read: its inode, which a rotation keeps, and the offset."""

    inode: int
    offset: int

    @classmethod
    def of(cls, found: Any) -> "Mark | None":
        """Return the mark in a JSON list, or None."""
        match found:
            case [int(inode), int(offset)] if offset >= 0:
                return cls(inode, offset)
        return None


def new_lines(path: Path, mark: Mark | None, to_the_end: bool = False) -> tuple[list[bytes], Mark | None]:
    """Return the next whole lines after `mark`, at most MOST_BYTES, and the new mark; none at the end.

    `to_the_end`: the file is complete, so an unterminated last line counts. If the file was rotated, the
    older one is read first. Raises OSError, but not if there is no file.
    """
    with suppress(FileNotFoundError):
        known = path.lstat()
        if mark == (known.st_ino, known.st_size):
            return [], mark  # nothing new, as in most of many files
    with ExitStack() as stack:
        files: list[tuple[int, BinaryIO]] = []
        # Open them in this order: with the other, a rotation in between would hide one of them.
        for each in (path, older(path)):
            with suppress(FileNotFoundError):
                file = stack.enter_context(opened(each.parent, each.name))
                files.insert(0, (os.fstat(file.fileno()).st_ino, file))
        begun = [at for at, (inode, _) in enumerate(files) if mark is not None and inode == mark.inode]
        for inode, file in files[begun[0] if begun else 0 :]:
            offset = mark.offset if mark is not None and inode == mark.inode else 0
            lines, offset = _lines(file, offset, to_the_end or file is not files[-1][1])
            mark = Mark(inode, offset)
            if lines:
                return lines, mark
    return [], mark


def _lines(file: BinaryIO, offset: int, to_the_end: bool) -> tuple[list[bytes], int]:
    if os.fstat(file.fileno()).st_size < offset:
        offset = 0  # the file was truncated
    file.seek(offset)
    content = file.read(MOST_BYTES)
    if not to_the_end or len(content) == MOST_BYTES:
        content = content[: content.rfind(b"\n") + 1] or (content if len(content) == MOST_BYTES else b"")
    return content.splitlines(), offset + len(content)


@dataclass(frozen=True)
class LogEntry:
    """An entry of a log: Unix seconds, level (empty if unknown), text, and further facts."""

    time: float
    level: str
    text: str
    attributes: dict[str, Any] = field(default_factory=dict)


def entries(lines: list[bytes], name: str, written: float) -> Iterator[LogEntry]:
    """Yield the entries of lines of the log `name`, which was last written at `written` (Unix seconds).

    A line that is no entry, such as one of a traceback, belongs to the entry before it.
    """
    entry: LogEntry | None = None
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip()
        found = _of_json(text) or _of_text(text, written)
        if found is None and entry is not None and len(entry.text) + len(text) < LONGEST_BODY:
            entry = replace(entry, text=f"{entry.text}\n{text}")
            continue
        if entry is not None:
            yield entry
        entry = found or (LogEntry(written, "", text[:LONGEST_BODY]) if text else None)
        if entry is not None:
            entry = replace(entry, attributes={"log.file.name": name, **entry.attributes})
    if entry is not None:
        yield entry


def _of_text(text: str, written: float) -> LogEntry | None:
    """Return the entry of a line of text. A line has no date, so the time of the last write provides it."""
    if (found := LINE.fullmatch(text)) is None:
        return None
    hour, minute, second, kind, number, level, message = found.groups()
    last = datetime.fromtimestamp(written)
    with suppress(ValueError):
        time = last.replace(hour=int(hour), minute=int(minute), second=int(second), microsecond=0)
        time = time - DAY if time > last + SLACK else time
        known = {f"tandem.{kind}": int(number)}
        return LogEntry(time.timestamp(), level or "info", message[:LONGEST_BODY], known)
    return None


def _of_json(text: str) -> LogEntry | None:
    if not text.startswith("{"):
        return None
    try:
        record = parsed(text.encode())
        time = datetime.fromisoformat(record["time"]).timestamp()
        body = str(record["message"])
        if exception := record.get("exception"):
            body = f"{body}\n{exception}"
        known = {"tandem.rank": record.get("rank"), "tandem.node": record.get("node")}
        known["tandem.step"] = record.get("step")
        attributes = {name: value for name, value in known.items() if isinstance(value, int)}
        return LogEntry(time, str(record.get("level", "")), body[:LONGEST_BODY], attributes)
    except (ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError):
        return None
