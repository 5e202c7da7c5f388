"""Where a run begins: decided once, by the agent (or the lone rank) and from manifests. Imports no torch."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from tandem.checkpoint.locate import locate
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.config.address import address
from tandem.config.removed import translated
from tandem.config.secrets import hidden, is_secret
from tandem.errors import ConfigError, CorruptCheckpointError

log = logging.getLogger("tandem.run")

BITS_MAY_DIFFER = {
    "nodes",
    "nproc",
    "elastic",
    "threads",
    "device",
    "compile",
    "micro_batch_size",
    "bucket_mb",
    "devices_per_rank",
    "batch_shares",
    "strategy",
}
PLACES = ("run_dir", "init_from")


@dataclass(frozen=True)
class ResumeDecision:
    """Where the run begins: "fresh" at step 0; "resume" at `step`; "complete" at `step`, nothing to train.

    Rank 0 reads the bytes, once, and hashes them as it does: the newest of the run's own checkpoints that
    holds, then `elsewhere`, in this order. `needed`: none that holds is an error, not a beginning at step 0.
    """

    kind: Literal["fresh", "resume", "complete"]
    step: int = 0
    elsewhere: tuple[tuple[PurePath, int], ...] = ()  # (directory, step) of another run, which is only read
    needed: bool = False
    changes: tuple[str, ...] = ()  # lines to log once
    moved_to: PurePath | None = None  # where checkpoints of this run that no longer count lie now


def decide_resume(settings: Settings, store: CheckpointStore) -> ResumeDecision:
    """Decide where to begin; the first that applies:

    1. `--resume never`: fresh; what lies in `store` is moved to checkpoints-before-<UTC time> beside it.
    2. `--resume PATH[@STEP]`, and the newest checkpoint here has exactly these settings: it is from this
       same command, which the platform started again; go on from it instead of going back.
    3. `--resume PATH[@STEP]`: that step, or the newest one there. PATH is a run, a checkpoints directory or
       one step in it; it is only read. Checkpoints here of another line of training are moved aside as in
       1, after those of PATH have been found whole.
    4. `auto`, `required`: the newest checkpoint here; one with a damaged manifest is quarantined.
    5. `required`: none here is an error.
    6. `auto`: fresh.

    For 2 to 4: another fingerprint than the settings' is an error and nothing is moved, if the bytes hold; a
    step that is not less than the planned ones, or at which the task ended the run, makes it "complete",
    whose bytes are read and hashed here: no rank will.
    Raises ConfigError (nothing there, fingerprint) and CheckpointError (damaged PATH@STEP, volume).
    """
    if settings.checkpoint.resume == "never":
        return ResumeDecision("fresh", moved_to=store.move_aside())
    if settings.checkpoint.resume not in ("auto", "required"):
        return _from_path(settings, store)
    found = store.newest(lambda step: _look(settings, store, step), say_damaged)
    if found is not None:
        return _begin_at(*found, needed=settings.checkpoint.resume == "required")
    if settings.checkpoint.resume == "required":
        raise ConfigError(nothing_valid(store.directory))
    return ResumeDecision("fresh")


def nothing_valid(directory: PurePath) -> str:
    """What is said when a checkpoint has to be there and none is whole."""
    return (
        f"{directory} contains no valid checkpoint, and --resume requires one; "
        "check --run-dir, or use --resume auto to start from scratch"
    )


def say_damaged(step: int, problem: str) -> None:
    """One line on a checkpoint that is passed over."""
    log.warning("checkpoint step %d is damaged (%s): falling back to the previous one", step, problem)


def _from_path(settings: Settings, store: CheckpointStore) -> ResumeDecision:
    here = store.newest(store.info, say_damaged, quarantine=False)
    if here is not None and _is_same_command(here[1], settings):
        decision = _begin_at(here[0], _look(settings, store, here[0]), needed=True)
        said = f"resuming from step {here[0]} of this run, which the same --resume has already reached"
        with suppress(ConfigError):
            decision = replace(decision, elsewhere=_candidates(*locate(settings.checkpoint.resume)))
        return replace(decision, changes=(*decision.changes, said))
    there, only = locate(settings.checkpoint.resume)
    same_line = _resolved(there.directory) == _resolved(store.directory)
    whole = same_line or bool(store.steps())  # nothing is moved aside for bytes that do not hold
    if only is not None:
        step, looked = only, _look(settings, there, only, whole)
    else:
        found = there.newest(lambda step: _look(settings, there, step, whole), say_damaged, quarantine=False)
        if found is None:
            raise ConfigError(nothing_valid(there.directory))
        step, looked = found
    decision = _begin_at(step, looked, needed=True)
    moved_to = store.move_aside(after_step=step if same_line else -1)
    return replace(decision, elsewhere=() if same_line else _candidates(there, only), moved_to=moved_to)


def _resolved(path: PurePath) -> PurePath:
    return path.resolve() if isinstance(path, Path) else path


def _candidates(there: CheckpointStore, only: int | None) -> tuple[tuple[PurePath, int], ...]:
    return tuple((there.directory, step) for step in ([only] if only is not None else there.steps()))


def _look(
    settings: Settings, store: CheckpointStore, step: int, whole: bool = False
) -> tuple[bool, tuple[str, ...]]:
    """(complete, changes) of going on from `step`. Raises ConfigError for another fingerprint."""
    info = store.info(step)
    try:
        unknown = _check_fingerprint(settings, info, store.path(step))
    except ConfigError:
        store.verify(step)  # bytes that do not hold are passed over, whatever run they were of
        raise
    if "train_samples" not in info:
        raise CorruptCheckpointError(f"the manifest of {store.path(step)} has no train_samples")
    steps_per_epoch = int(info["train_samples"]) // settings.data.batch_size
    planned = settings.run.steps or settings.run.epochs * steps_per_epoch
    is_last = step >= planned or info.get("ended_of") == planned  # the task ended this very run
    complete = is_last and not info.get("owes_evaluation")
    if whole or complete:
        store.verify(step)
    return complete, (*unknown, *_changes(info, settings))


def _begin_at(step: int, looked: tuple[bool, tuple[str, ...]], needed: bool) -> ResumeDecision:
    complete, changes = looked
    return ResumeDecision("complete" if complete else "resume", step, needed=needed, changes=changes)


def _is_same_command(info: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a checkpoint has these settings; what only one of the two programs knows does not count."""
    old, new = _saved(info), _plain(settings.to_dict())
    return "resume" in old and all(old[key] == new[key] for key in old.keys() & new.keys())


def _check_fingerprint(settings: Settings, info: Mapping[str, Any], path: PurePath) -> list[str]:
    """Raises ConfigError where old and new differ; a line for each that only one of the programs knows."""
    old, new = translated(info.get("fingerprint", {})), _plain(settings.fingerprint_fields())
    known = old.keys() & new.keys()
    was, now = (_flat({key: values[key] for key in known}) for values in (old, new))
    differing = [
        f"{key} was {_told(key, was)} and is {_told(key, now)} now"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]
    if differing:
        raise ConfigError(
            f"cannot resume {path}: {', '.join(differing)}; restore the old value, or use "
            "another --run-dir or --resume never"
        )
    return [
        f"{key} is {_told(key, {**new, **old})!r}; not compared, because the version of tandem that "
        f"{'is running' if key in old else 'saved the checkpoint'} does not have this setting"
        for key in sorted((old.keys() - settings.to_dict().keys()) | (new.keys() - old.keys()))
    ]


def _changes(info: Mapping[str, Any], settings: Settings) -> list[str]:
    old, new = _saved(info), _plain(settings.to_dict())
    no_matter = {"resume", "master", "node_rank", "on_data_change"}
    same = {*settings.fingerprint_fields(), *no_matter}
    return [
        f"{key} was {_given(_told(key, old))} and is {_given(_told(key, new))} now"
        + (" (the last bits of the weights may differ)" if key in BITS_MAY_DIFFER else "")
        for key in new
        if key not in same and old.get(key) != new[key]
    ]


def _told(name: str, values: Mapping[str, Any]) -> object:
    """What a line may say of a setting: logs and reports are shown to others than the checkpoint is."""
    return hidden(values[name], is_named=is_secret(name), is_setting=True) if name in values else "not set"


def _given(value: object) -> object:
    return "not set" if value is None or value == "" else value


def _saved(info: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint; some were saved with s3:/bucket where they said s3://bucket."""
    saved = translated(info.get("settings", {}))
    return saved | {name: str(address(saved[name])) for name in PLACES if saved.get(name)}


def _plain(values: object) -> dict[str, Any]:
    """As a manifest gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """task_fields {"noise": "3"} -> "task.noise": "3", so that a message can name the field."""
    fields = {f"task.{name}": value for name, value in fingerprint.get("task_fields", {}).items()}
    return {**{key: value for key, value in fingerprint.items() if key != "task_fields"}, **fields}
