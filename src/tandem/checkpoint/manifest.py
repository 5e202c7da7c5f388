"""The manifest that says what a checkpoint's files must be, and of which bytes it is made itself."""

import hashlib
import json
import time
from typing import Any

from tandem.checkpoint.storage.protocol import Reader
from tandem.errors import CheckpointError, CorruptCheckpointError

FORMAT = 1
CHUNK_BYTES = 2**20


def render_manifest(step: int, files: dict[str, dict[str, object]], info: dict[str, Any]) -> bytes:
    body = {"format": FORMAT, "step": step, "written_at": time.time(), "files": files, "info": info}
    return seal(json.loads(json.dumps(body, default=str)))  # as JSON will have it: keys are text


def seal(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def parse_manifest(path: object, raw: bytes) -> dict[str, Any]:
    """Raises CorruptCheckpointError unless these are the very bytes that `seal` made."""
    try:
        body = json.loads(raw)
        del body["manifest_sha256"]
        whole = seal(body) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 does not hold")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}; this tandem reads {FORMAT}, use a newer")
    manifest: dict[str, Any] = body
    return manifest


def check(path: object, wanted: dict[str, Any], size: int, digest: str) -> None:
    if size != wanted["bytes"]:
        raise CorruptCheckpointError(f"{path} has {size} bytes, {wanted['bytes']} were written")
    if digest != wanted["sha256"]:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 is not that of the bytes written")


def measured(file: Reader) -> tuple[int, str]:
    """(bytes, SHA-256) of a file, read a piece at a time."""
    size, digest = 0, hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()
