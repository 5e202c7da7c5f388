"""The manifest: size and hash of each of a checkpoint's files, and a hash of the manifest itself."""

import hashlib
import json
import os
import re
import time
from typing import Any

from tandem.bounded_reader import DEEPEST, LARGEST, JsonShape, count, finite, is_deep, text, typed
from tandem.checkpoint.storage.protocol import StorageReader
from tandem.errors import CheckpointError, CorruptCheckpointError

FORMAT = 1
SHARDED = 2
"""The format of a checkpoint with a file per rank, which versions without sharded checkpoints refuse."""
CHUNK_BYTES = 2**20
LARGEST_BYTES = 16 * 2**20
"""Limit on the size of a manifest: about a thousand times the usual size."""
STATE_NAME = re.compile(r"state(-[0-9a-f]{1,32})?\.pt")
SHARD_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})(-[0-9a-f]{1,32})?\.bin")


def render_manifest(step: int, files: dict[str, dict[str, object]], info: dict[str, Any]) -> bytes:
    kind = FORMAT if len(files) == 1 else SHARDED
    body = {"format": kind, "step": step, "written_at": time.time(), "files": files, "info": info}
    return seal(json.loads(json.dumps(body, default=str)))  # as read back from JSON: keys become strings


def seal(body: dict[str, Any]) -> bytes:
    """Add a SHA-256 of the manifest to it and return its bytes; `parse_manifest` compares them exactly."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def parse_manifest(path: object, raw: bytes) -> dict[str, Any]:
    """Return the manifest. Raises CorruptCheckpointError unless these are the bytes of a valid manifest.

    The bytes must be exactly those that `seal` wrote. Raises CheckpointError for a format of a newer tandem.
    """
    try:
        body = json.loads(raw)
        del body["manifest_sha256"]
        whole = seal(body) == raw
    # Arbitrary bytes can fail in each of these ways, and all of them mean damage.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        whole = False
    if not whole:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 does not match")
    # Check the format before the fields, because a newer format may have other fields.
    if type(body.get("format")) is int and body["format"] >= 0 and body["format"] not in (FORMAT, SHARDED):
        known = f"{FORMAT} or {SHARDED}"
        raise CheckpointError(f"{path} has format {body['format']}, expected {known}; use a newer tandem")
    if problem := _problem(body):
        raise CorruptCheckpointError(f"{path} is not a manifest written by tandem: {problem}")
    manifest: dict[str, Any] = body
    return manifest


def _problem(body: dict[str, Any]) -> str:
    """Describe what differs from the output of `render_manifest`; "" if nothing does.

    Values are not shown, because a task's settings may contain a password.
    """
    if is_deep(body):
        return f"it is nested deeper than {DEEPEST} levels"
    manifest = SHARDED_MANIFEST if body.get("format") == SHARDED else MANIFEST
    for shape, values, where in ((manifest, body, ""), (INFO, body.get("info"), "info.")):
        try:
            _, wrong = typed(values, shape)
        except ValueError as error:
            return f"it {error}"
        if wrong:
            return f"its {where}{wrong[0]} has the wrong type"
    return ""


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _only_the_state(value: object) -> object:
    """Accept exactly one file, with the name of a state, so that it cannot point elsewhere."""
    if not isinstance(value, dict) or len(value) != 1:
        raise TypeError("not one file")
    ((name, entry),) = value.items()
    _measured(entry if STATE_NAME.fullmatch(name) else {})
    return value


def _measured(entry: object) -> None:
    """Accept the entry of a file."""
    count(_table(entry).get("bytes"))
    _digest(_table(entry).get("sha256"))


def _digest(value: object) -> None:
    if len(text(value)) != 64:
        raise ValueError("not a digest")


def _state_and_shards(value: object) -> object:
    """Accept the file of the state and one file of each rank, with an index at its end."""
    files = dict(_table(value))
    _only_the_state({name: files.pop(name) for name in [*files] if STATE_NAME.fullmatch(name)})
    for name, entry in files.items():
        _measured(entry if SHARD_NAME.fullmatch(name) else {})
        index = _table(_table(entry).get("index"))
        _digest(index.get("sha256"))
        if count(index.get("offset")) > entry["bytes"]:
            raise ValueError("an index behind the end of its file")
    ranks = [(match[1], match[2]) for name in files if (match := SHARD_NAME.fullmatch(name))]
    if sorted(ranks) != [(f"{rank:05d}", f"{len(ranks):05d}") for rank in range(len(ranks))] or not ranks:
        raise ValueError("not one file of each rank")
    return value


def is_sharded(manifest: dict[str, Any]) -> bool:
    """Return True if each rank has written its own file."""
    return bool(manifest["format"] == SHARDED)


def state_entry(manifest: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, entry) of the file with the state, or with the part of it that is not sharded."""
    return next((name, entry) for name, entry in manifest["files"].items() if STATE_NAME.fullmatch(name))


def shard_entries(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {name: entry} of the ranks' files, by rank."""
    return {name: entry for name, entry in sorted(manifest["files"].items()) if SHARD_NAME.fullmatch(name)}


def _scores(value: object) -> object:
    """Reject integers outside the range that readers accept; floats can have any value."""
    if any(isinstance(each, int) and abs(each) >= LARGEST for each in _table(value).values()):
        raise ValueError("a number out of range")
    return value


def _fingerprint(value: object) -> object:
    _table(_table(value).get("task_fields", {}))
    return value


MANIFEST = JsonShape(
    {"format": count, "step": count, "written_at": finite, "files": _only_the_state, "info": _table},
    required=frozenset({"format", "step", "written_at", "files", "info"}),
)
SHARDED_MANIFEST = JsonShape(
    {"format": count, "step": count, "written_at": finite, "files": _state_and_shards, "info": _table},
    required=frozenset({"format", "step", "written_at", "files", "info"}),
)
INFO = JsonShape({
    "settings": _table, "fingerprint": _fingerprint, "eval": _scores, "train_samples": count,
    "steps_per_epoch": count, "steps_planned": count, "ended_of": count, "task": text,
    "data": _table, "micro_batch_fits": count,
})  # fmt: skip
"""The keys of `info` that this version reads. A later version may write more."""


def check_size(path: object, wanted: dict[str, Any], size: int) -> None:
    """Compare the size with the manifest, before anything is read. Raises CorruptCheckpointError."""
    if size != wanted["bytes"]:
        raise CorruptCheckpointError(f"{path} has {size} bytes, expected {wanted['bytes']}")


def check_fits(path: object, size: int) -> None:
    """Raise CheckpointError if a file is larger than this machine's memory, before it is read.

    Such a file is not damaged: it may come from a machine with more memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but this machine has only {memory:,} bytes of memory"
        )


def check(path: object, wanted: dict[str, Any], size: int, digest: str) -> None:
    """Raise CorruptCheckpointError if the size or the SHA-256 differs from the manifest."""
    check_size(path, wanted, size)
    if digest != wanted["sha256"]:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 does not match the manifest")


def measured(file: StorageReader) -> tuple[int, str]:
    """Return (bytes, SHA-256) of a file, read in chunks."""
    size = 0
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()
