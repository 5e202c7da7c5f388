"""What is saved, as bytes; the fingerprint of weights; and the decision where a run begins."""

import hashlib
import io
import json
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tandem.checkpoint.store import CheckpointStore, locate
from tandem.errors import CheckpointError, ConfigError

BITS_MAY_DIFFER = {"nodes", "nproc", "elastic", "threads", "device", "compile", "micro_batch_size"}


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 of the parameters and buffers of an unwrapped module (of its state_dict, keys sorted).

    Per key: UTF-8 name, NUL, str(dtype) such as "torch.float32", str(tuple(shape)) such as "(3, 4)", then
    the elements in row-major order, little-endian. A compiled module has the digest of its original.
    """
    digest = hashlib.sha256()
    original = getattr(module, "_orig_mod", module)
    for name, value in sorted(original.state_dict().items()):
        if isinstance(value, Tensor):  # a module's get_extra_state may put anything else there
            digest.update(f"{name}\0{value.dtype}{tuple(value.shape)}".encode())
            digest.update(_little_endian(value))
    return digest.hexdigest()


def _little_endian(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    if sys.byteorder == "big":
        width = flat.element_size() // (2 if flat.is_complex() else 1)
        raw = raw.reshape(-1, width).flip(1).contiguous().reshape(-1)
    return raw.numpy().data


def serialize(state: Mapping[str, Any]) -> bytes:
    """The state as torch.save writes it. Raises CheckpointError for what could not be loaded again."""
    check_loadable(state)
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def deserialize(raw: bytes) -> dict[str, Any]:
    """Inverse of `serialize`, tensors on the CPU; no pickled code runs. Raises CheckpointError."""
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's state cannot be loaded: {_first_line(error)}") from error
    return state


def check_loadable(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for what `deserialize` would refuse; costs about 1 ms."""
    for key, value in state.items():
        _check_loadable(key, value)


def _check_loadable(key: str, value: object) -> None:
    """Save and load `value` with its tensors left out: found out now rather than at a resume."""
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state's {key!r} cannot be saved ({_first_line(error)}); "
            "keep to tensors, numbers, text, lists and dicts"
        ) from error


def _without_tensors(value: object) -> object:
    if isinstance(value, Tensor):
        return None
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(item) for key, item in value.items()}  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return [_without_tensors(item) for item in value]  # type: ignore[attr-defined]
    return value


def _first_line(error: BaseException) -> str:
    """torch's weights_only error has its reason in the middle of its advice."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].partition(" Please use `torch")[0].strip()
    return (text or type(error).__name__).splitlines()[0].strip()


class ResumeSettings(Protocol):
    """The part of config.Settings that the decision reads."""

    @property
    def resume(self) -> str: ...
    @property
    def epochs(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def batch_size(self) -> int: ...
    def to_dict(self) -> dict[str, object]: ...
    def fingerprint_fields(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class ResumeDecision:
    """Where the run begins: "fresh" at step 0; "resume" or "complete" with `step` of `directory`."""

    kind: Literal["fresh", "resume", "complete"]
    step: int = 0
    directory: Path | None = None  # of checkpoints; another run's after --resume PATH
    info: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)  # lines to log once
    quarantined: list[tuple[int, str]] = field(default_factory=list)  # (step, problem), newest first
    moved_to: Path | None = None  # where checkpoints of this run that no longer count lie now


def decide_resume(settings: ResumeSettings, store: CheckpointStore) -> ResumeDecision:
    """Decide where to begin; the first that applies:

    1. `--resume never`: fresh; what lies in `store` is moved to checkpoints-before-<UTC time> beside it.
    2. `--resume PATH[@STEP]`, and the newest valid checkpoint here has exactly these settings: it is from
       this same command, which the platform started again; go on from it instead of going back.
    3. `--resume PATH[@STEP]`: that step, or the newest valid one there. PATH is a run, a checkpoints
       directory or one step in it. Checkpoints here of another line of training are moved aside as in 1;
       another run's directory is only read.
    4. `auto`, `required`: the newest valid checkpoint here; damaged ones are quarantined.
    5. `required`: none here is an error.
    6. `auto`: fresh.

    For 2 to 4: another fingerprint than the settings' is an error and nothing is moved; a step that is
    not less than the planned ones makes it "complete".
    Raises ConfigError (nothing there, fingerprint) and CheckpointError (damaged PATH@STEP, volume).
    """
    if settings.resume == "never":
        return ResumeDecision("fresh", moved_to=store.move_aside())
    if settings.resume not in ("auto", "required"):
        return _from_path(settings, store)
    quarantined: list[tuple[int, str]] = []
    step = store.newest_step(lambda step, problem: quarantined.append((step, problem)))
    if step is not None:
        return _begin_at(settings, store, step, quarantined)
    if settings.resume == "required":
        raise ConfigError(
            f"--resume required, but {store.directory} holds no valid checkpoint; "
            "check --run-dir, or give --resume auto to begin afresh"
        )
    return ResumeDecision("fresh", quarantined=quarantined)


def _from_path(settings: ResumeSettings, store: CheckpointStore) -> ResumeDecision:
    damaged: list[tuple[int, str]] = []

    def note(step: int, problem: str) -> None:
        damaged.append((step, problem))

    here = store.newest_step(note, quarantine=False)
    if here is not None and store.info(here).get("settings") == _plain(settings.to_dict()):
        decision = _begin_at(settings, store, here, damaged)
        decision.changes.append(f"going on from step {here} here, which this same --resume has reached")
        return decision
    damaged.clear()
    there, step = locate(settings.resume)
    if step is not None:
        there.verify(step)
    else:
        step = there.newest_step(note, quarantine=False)
    if step is None:
        raise ConfigError(f"{there.directory} holds no valid checkpoint: {damaged[0][1]}")
    decision = _begin_at(settings, there, step, damaged)
    same_line = there.directory.resolve() == store.directory.resolve()
    moved_to = store.move_aside(after_step=step if same_line else -1)
    return ResumeDecision(**{**vars(decision), "moved_to": moved_to})


def _begin_at(
    settings: ResumeSettings, store: CheckpointStore, step: int, damaged: list[tuple[int, str]]
) -> ResumeDecision:
    info = store.info(step)
    _check_fingerprint(settings, info, store.path(step))
    planned = settings.steps or settings.epochs * (int(info["train_samples"]) // settings.batch_size)
    kind: Literal["resume", "complete"] = "complete" if step >= planned else "resume"
    changes = _changes(_plain(info.get("settings", {})), _plain(settings.to_dict()), settings)
    return ResumeDecision(kind, step, store.directory, info, changes, damaged)


def _check_fingerprint(settings: ResumeSettings, info: Mapping[str, Any], path: Path) -> None:
    old, new = _flat(info.get("fingerprint", {})), _flat(_plain(settings.fingerprint_fields()))
    differing = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise ConfigError(
            f"cannot resume {path}: {', '.join(differing)}; give the old value, "
            "another --run-dir, or --resume never"
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], settings: ResumeSettings) -> list[str]:
    same = {*settings.fingerprint_fields(), "resume"}
    return [
        f"{key} was {old.get(key)!r} and is {new[key]!r} now"
        + (" (the weights may differ in their last bits)" if key in BITS_MAY_DIFFER else "")
        for key in new
        if key not in same and old.get(key) != new[key]
    ]


def _plain(values: object) -> dict[str, Any]:
    """As a manifest gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """task_fields {"noise": "3"} -> "task.noise": "3", so that a message can name the field."""
    fields = {f"task.{name}": value for name, value in fingerprint.get("task_fields", {}).items()}
    return {**{key: value for key, value in fingerprint.items() if key != "task_fields"}, **fields}
