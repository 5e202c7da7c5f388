"""Read numbers by step from the logs of training programs, without their libraries.

Known formats: JSON lines, transformers' trainer_state.json, CSV (such as Lightning's metrics.csv), and the
event files of TensorBoard. A regular expression reads any other text. Standard library only.
"""

import csv
import io
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

STEP_NAMES = ("global_step", "step", "iteration", "iter", "batch", "epoch")
"""Names for a step, the most precise one first."""
TIMES = re.compile(
    r"(?:^|[_./ ])(?:time|secs?|seconds|runtime|elapsed|duration|eta|timestamp|throughput|speed|memory)"
    r"(?:$|[_./ ])|per_sec|walltime|/s$",
    re.IGNORECASE,
)
"""Names of values that differ between any two runs."""
MOST_BYTES = 64 * 2**20


class Row(NamedTuple):
    """One logged line or event: its step, None if it has none, and its numbers by name."""

    step: float | None
    values: dict[str, float]


def numbers_of(value: Any, name: str = "") -> dict[str, float]:
    """Flatten the numbers in nested JSON: {"a": {"b": 1}} -> {"a.b": 1.0}; times are left out."""
    found: dict[str, float] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            found.update(numbers_of(inner, f"{name}.{key}" if name else str(key)))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            found.update(numbers_of(inner, f"{name}.{key}"))
    elif isinstance(value, int | float) and not isinstance(value, bool) and not TIMES.search(name):
        found[name] = float(value)
    return found


def row_of(values: dict[str, float]) -> Row:
    """Return the row of these numbers; its step is the value with the most precise name."""
    names = {name.lower(): name for name in reversed(values)}
    step = next((names[each] for each in STEP_NAMES if each in names), None)
    return Row(values[step] if step is not None else None, {k: v for k, v in values.items() if k != step})


def json_lines(raw: bytes) -> list[Row]:
    """Read one JSON object per line; other lines, and a last line that was cut off, are skipped."""
    rows = []
    for line in raw.splitlines():
        if line.lstrip().startswith(b"{"):
            try:
                rows.append(row_of(numbers_of(json.loads(line))))
            except (ValueError, RecursionError):
                continue
    return rows


def trainer_state(raw: bytes) -> list[Row]:
    """Read the `log_history` of transformers' trainer_state.json."""
    try:
        history = json.loads(raw)["log_history"]
        return [row_of(numbers_of(each)) for each in history]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def table(raw: bytes) -> list[Row]:
    """Read a CSV file with a header, such as Lightning's metrics.csv; empty cells are skipped."""
    rows = []
    for cells in csv.DictReader(io.StringIO(raw.decode(errors="replace"))):
        values = {}
        for name, text in cells.items():
            if name and isinstance(text, str) and not TIMES.search(name):
                try:
                    values[name] = float(text)
                except ValueError:
                    continue
        rows.append(row_of(values))
    return rows


def lines_like(raw: bytes, pattern: re.Pattern[str]) -> list[Row]:
    """Read lines that match a pattern whose named groups are numbers; `step` is one of the names."""
    rows = []
    for found in pattern.finditer(raw.decode(errors="replace")):
        values = {}
        for name, text in found.groupdict().items():
            try:
                values[name] = float(text)
            except (TypeError, ValueError):
                continue
        rows.append(row_of(values))
    return rows


def event_file(raw: bytes) -> list[Row]:
    """Read the scalars of a TensorBoard event file, up to the first record that was cut off."""
    rows = []
    for record in _records(raw):
        try:
            event = list(_fields(record))
            step = next((int(value) for number, value in event if number == 2), 0)
            for number, summary in event:
                if number == 5:
                    rows += [Row(float(step), values) for values in map(_scalar, _fields(summary)) if values]
        except (IndexError, struct.error, TypeError):
            break
    return rows


def _records(raw: bytes) -> Iterator[bytes]:
    # A record: length (8 bytes), its checksum (4), the bytes, their checksum (4).
    start = 0
    while start + 12 <= len(raw):
        length = struct.unpack_from("<Q", raw, start)[0]
        end = start + 12 + length
        if end + 4 > len(raw):
            return
        yield raw[start + 12 : end]
        start = end + 4


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a protocol buffer: an int, a float or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
        elif kind == 1:
            yield number, struct.unpack_from("<d", message, at)[0]
            at += 8
        elif kind == 2:
            length, at = _varint(message, at)
            yield number, message[at : at + length]
            at += length
        elif kind == 5:
            yield number, struct.unpack_from("<f", message, at)[0]
            at += 4
        else:
            raise IndexError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, at


def _scalar(field: tuple[int, Any]) -> dict[str, float]:
    """Return {tag: value} of a summary's value; {} if it is no scalar."""
    number, message = field
    if number != 1:
        return {}
    parts = dict(_fields(message))
    tag = parts.get(1, b"").decode(errors="replace")
    value = parts.get(2)
    if value is None and 8 in parts:
        # A tensor of one float: dtype is field 1, and its value is packed in field 5 or raw in field 4.
        tensor = dict(_fields(parts[8]))
        raw = tensor.get(5, tensor.get(4))
        if tensor.get(1) == 1 and isinstance(raw, float | bytes):
            value = raw if isinstance(raw, float) else struct.unpack("<f", raw)[0] if len(raw) == 4 else None
    return {tag: float(value)} if isinstance(value, float) and not TIMES.search(tag) else {}


def reader_of(path: PurePath, pattern: re.Pattern[str] | None) -> Callable[[bytes], list[Row]] | None:
    """Return the reader for a file, by its name; None if there is none."""
    if path.name == "trainer_state.json":
        return trainer_state
    if ".tfevents." in path.name:
        return event_file
    if path.suffix in (".jsonl", ".ndjson"):
        return json_lines
    if path.suffix == ".csv":
        return table
    if pattern is not None and path.suffix in (".log", ".txt", ".out", ".err", ""):
        return lambda raw: lines_like(raw, pattern)
    return None


def key_of(path: PurePath) -> str:
    """Return the name of the log to which a file belongs: a restart may continue it in another file.

    Lightning starts a new directory version_N, and TensorBoard a new event file.
    """
    parts = [re.sub(r"^version_\d+$", "version_*", part) for part in path.parts]
    if ".tfevents." in path.name:
        parts[-1] = "events.out.tfevents.*"
    return str(PurePath(*parts))


def read_logs(
    folder: Path, paths: Iterable[PurePath], pattern: re.Pattern[str] | None
) -> dict[str, list[Row]]:
    """Return {log: rows in the order of writing} of all files in `paths`, relative to `folder`, with rows."""

    def written(path: PurePath) -> float:
        try:
            return (folder / path).stat().st_mtime
        except OSError:
            return 0.0

    found: dict[str, list[Row]] = {}
    for path in sorted(paths, key=lambda path: (written(path), str(path))):
        reader = reader_of(path, pattern)
        if reader is None:
            continue
        try:
            with (folder / path).open("rb") as file:
                rows = [row for row in reader(file.read(MOST_BYTES)) if row.values or row.step is not None]
        except OSError:
            continue
        if rows:
            found.setdefault(key_of(path), []).extend(rows)
    return found


def by_step(rows: Iterable[Row]) -> dict[str, dict[float, float]]:
    """Return {name: {step: last value}}; rows without a step are counted from 1."""
    found: dict[str, dict[float, float]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        for name, value in row.values.items():
            counts[name] = counts.get(name, 0) + 1
            found.setdefault(name, {})[counts[name] if row.step is None else row.step] = value
    return found


def is_same(one: float, other: float) -> bool:
    """Compare two logged numbers; NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))
