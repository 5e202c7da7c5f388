"""The manifest that says what a checkpoint's files must be, and of which bytes it is made itself."""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

from tandem.checkpoint.storage.protocol import Reader
from tandem.errors import CheckpointError, CorruptCheckpointError

FORMAT = 1
CHUNK_BYTES = 2**20
LARGEST_BYTES = 16 * 2**20
"""Of a manifest; a thousand times what one has."""
DEEPEST, LARGEST = 16, 2**63
STATE_NAME = re.compile(r"state(-[0-9a-f]{1,32})?\.pt")


def render_manifest(step: int, files: dict[str, dict[str, object]], info: dict[str, Any]) -> bytes:
    body = {"format": FORMAT, "step": step, "written_at": time.time(), "files": files, "info": info}
    return seal(json.loads(json.dumps(body, default=str)))  # as JSON will have it: keys are text


def seal(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def parse_manifest(path: object, raw: bytes) -> dict[str, Any]:
    """Raises CorruptCheckpointError unless these are the very bytes that `seal` made, of a manifest."""
    try:
        body = json.loads(raw)
        del body["manifest_sha256"]
        whole = seal(body) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        whole = False
    if not whole:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 does not hold")
    if _is_natural(body.get("format")) and body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}; this tandem reads {FORMAT}, use a newer")
    if problem := _problem(body):
        raise CorruptCheckpointError(f"{path} is no manifest of tandem's: {problem}")
    manifest: dict[str, Any] = body
    return manifest


def _problem(body: dict[str, Any]) -> str:
    """What is not as `render_manifest` writes it, in a few words; "": nothing. One schema for all readers."""
    if _is_deep(body):
        return f"it is nested deeper than {DEEPEST} levels"
    for name, is_valid in FIELDS.items():
        if not is_valid(body.get(name)):
            return f"its {name} is {_shown(body.get(name))}"
    for name, is_valid in INFO_FIELDS.items():
        if name in body["info"] and not is_valid(body["info"][name]):
            return f"its info.{name} is {_shown(body['info'][name])}"
    return ""


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:80]


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _is_finite(value: object) -> bool:
    return _is_natural(value) or (isinstance(value, float) and math.isfinite(value))


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_one_file(value: object) -> bool:
    """The state, and nothing else, under a name of ours: no path to another place."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((name, entry),) = value.items()
    if STATE_NAME.fullmatch(name) is None or not isinstance(entry, dict):
        return False
    digest = entry.get("sha256")
    return _is_natural(entry.get("bytes")) and isinstance(digest, str) and len(digest) == 64


def _are_scores(value: object) -> bool:
    """Numbers may be of any size as floats only: others have none."""
    if not isinstance(value, dict):
        return False
    return all(not isinstance(each, int) or abs(each) < LARGEST for each in value.values())


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("task_fields", {}), dict)


FIELDS: dict[str, Callable[[object], bool]] = {
    "format": _is_natural,
    "step": _is_natural,
    "written_at": _is_finite,
    "files": _is_one_file,
    "info": _is_dict,
}
INFO_FIELDS: dict[str, Callable[[object], bool]] = {
    "settings": _is_dict,
    "fingerprint": _is_fingerprint,
    "eval": _are_scores,
    "train_samples": _is_natural,
}
"""What this version reads of `info`, which a later one may have more of."""


def check_size(path: object, wanted: dict[str, Any], size: int) -> None:
    """Before anything is read."""
    if size != wanted["bytes"]:
        raise CorruptCheckpointError(f"{path} has {size} bytes, {wanted['bytes']} were written")


def check(path: object, wanted: dict[str, Any], size: int, digest: str) -> None:
    check_size(path, wanted, size)
    if digest != wanted["sha256"]:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 is not that of the bytes written")


def measured(file: Reader) -> tuple[int, str]:
    """(bytes, SHA-256) of a file, read a piece at a time."""
    size, digest = 0, hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()
