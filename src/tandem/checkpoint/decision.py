"""Decide where a run begins: once, in the agent (or the only rank), from manifests. Does not import torch."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from tandem import layout
from tandem.checkpoint.storage.protocol import STEP_NAME
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.config.address import address, hidden, is_secret
from tandem.config.removed import translated
from tandem.errors import ConfigError, CorruptCheckpointError
from tandem.paths import exists, is_directory

log = logging.getLogger("tandem.run")

# Find the checkpoints a user names: a run, its checkpoints directory, or one step. No torch here.

LINKED = "checkpoints is a symbolic link, which tandem does not follow"


def is_linked(run_dir: PurePath) -> bool:
    """Return True if `checkpoints` in the run is a symbolic link, which readers must not follow."""
    return isinstance(run_dir, Path) and (run_dir / layout.CHECKPOINTS).is_symlink()


def checkpoints_of(run: str | PurePath) -> CheckpointStore:
    """Return the checkpoints of a run, or those in `run` itself if it is a directory of checkpoints.

    Raises ConfigError if it is a symbolic link in the run, or cannot be read.
    """
    path = address(run)
    with _readable(path):
        return _checkpoints_in(path)


@contextmanager
def _readable(path: PurePath) -> Iterator[None]:
    """Raise ConfigError, not OSError, if this user may not read a directory that the user named."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; ask its owner for access, or copy the run as its owner"
        ) from error


def _checkpoints_in(path: PurePath) -> CheckpointStore:
    if is_linked(path):
        raise ConfigError(f"{path}: {LINKED}; give the directory it points to")
    inner = CheckpointStore(path / layout.CHECKPOINTS)
    has_inner = is_directory(inner.directory) if isinstance(path, Path) else inner.steps()
    return inner if has_inner else CheckpointStore(path)


def locate(text: str) -> tuple[CheckpointStore, int | None]:
    """Resolve PATH[@STEP] to (store, step or None for the newest). PATH: a run, its checkpoints, or one step.

    Raises ConfigError if there is no such checkpoint.
    """
    with _readable(Path(text)):
        return _located(text)


def _located(text: str) -> tuple[CheckpointStore, int | None]:
    # An existing file or directory wins, because a run's name may itself contain an @.
    name, at, number = text.rpartition("@")
    step = int(number) if at and number.isdecimal() and not exists(Path(text)) else None
    path = address(text if step is None else name)
    if isinstance(path, Path):
        if not is_directory(path):
            raise ConfigError(
                f"{path} is not a directory; give a run, its checkpoints directory, or one step-... in it"
            )
        path = path.resolve()
    if step is None and (match := STEP_NAME.fullmatch(path.name)):
        path = path.parent
        step = int(match[1])
    store = _checkpoints_in(path)
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{store.directory} contains no checkpoint; give a run that has saved one")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        raise ConfigError(f"{store.directory} has no checkpoint of step {step}; available steps: {there}")
    return store, step


# These settings change the order of additions or the kernels, so a resumed run is correct but not equal in
# every bit.
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
    """Where the run begins: "fresh" at step 0, "resume" at `step`, or "complete" at `step`.

    "complete" means that no steps are left to train.

    Rank 0 reads the state once and hashes it while reading. It tries the run's own checkpoints from the
    newest to the oldest, then `elsewhere` in its order. With `needed`, it is an error if none of them is
    valid; without, the run starts at step 0.
    """

    kind: Literal["fresh", "resume", "complete"]
    step: int = 0
    elsewhere: tuple[tuple[PurePath, int], ...] = ()  # (directory, step) in other runs, which are only read
    needed: bool = False
    changes: tuple[str, ...] = ()  # log messages
    moved_to: PurePath | None = None  # where this run's outdated checkpoints were moved
    micro_batch: int | None = None  # replaces --micro-batch-size, because larger ones ran out of memory


def decide_resume(settings: Settings, store: CheckpointStore) -> ResumeDecision:
    """Decide where to begin, and log it. The first rule that applies decides:

    1. `--resume never`: fresh. The contents of `store` are moved to a sibling, checkpoints-before-<UTC time>.
    2. `--resume PATH[@STEP]`, and the newest checkpoint here has exactly these settings: the platform has
       restarted this same command. Continue from that checkpoint instead of going back to PATH.
    3. `--resume PATH[@STEP]`: that step, or the newest one there. PATH is a run, a checkpoints directory or
       one step in it, and is only read. Checkpoints of the previous training are moved as in rule 1, after a
       checkpoint of PATH has been verified.
    4. `auto`, `required`: the newest checkpoint here. One with a damaged manifest is quarantined.
    5. `required`: an error if there is no checkpoint here.
    6. `auto`: fresh.

    In rules 2 to 4, a valid checkpoint with a different fingerprint is an error, and nothing is moved. The
    decision is "complete" if no planned step is left, or if the task ended the run there. The state is then
    read and hashed here, because no rank will read it.

    Raises ConfigError (no checkpoint, different fingerprint) and CheckpointError (damaged PATH@STEP, failing
    volume).
    """
    decision = _first_that_applies(settings, store)
    if decision.kind == "complete":
        log.info(
            "the run in %s already finished at step %s; raise --epochs or --steps to continue",
            store.directory.parent,
            f"{decision.step:,}",
        )
        return decision
    for change in decision.changes:
        log.info("changed since the checkpoint: %s", change)
    if decision.micro_batch is not None:
        log.info(
            "micro-batches of at most %d, because larger ones ran out of memory before the checkpoint; "
            "--micro-batch-size sets another size",
            decision.micro_batch,
        )
    if decision.moved_to is not None:
        log.info("earlier checkpoints were moved to %s", decision.moved_to)
    return decision


def _first_that_applies(settings: Settings, store: CheckpointStore) -> ResumeDecision:
    if settings.checkpoint.resume == "never":
        return ResumeDecision("fresh", moved_to=store.move_aside())
    if settings.checkpoint.resume not in ("auto", "required"):
        return _from_path(settings, store)
    had_some = bool(store.all_steps())
    found = store.newest(lambda step: _look(settings, store, step), warn_damaged)
    if found is not None:
        return found[1]
    if settings.checkpoint.resume == "required":
        raise ConfigError(nothing_valid(store.directory))
    if had_some:
        warn_none_left(store.directory)
    return ResumeDecision("fresh")


def nothing_valid(directory: PurePath) -> str:
    """Return the error message for a required checkpoint when no checkpoint is valid."""
    return (
        f"{directory} contains no valid checkpoint, and --resume requires one; "
        "check --run-dir, or use --resume auto to start from scratch"
    )


def warn_damaged(step: int, problem: str) -> None:
    """Log a one-line warning about a damaged checkpoint that is skipped."""
    log.warning("checkpoint step %d is damaged (%s): trying the one before it", step, problem)


def warn_none_left(directory: PurePath) -> None:
    """Log a warning: all checkpoints were damaged, so the run starts at step 0."""
    log.warning(
        "no valid checkpoint is left in %s: training starts at step 0; --resume required would stop instead",
        directory,
    )


def _from_path(settings: Settings, store: CheckpointStore) -> ResumeDecision:
    here = store.newest(store.info, warn_damaged, quarantine=False)
    if here is not None and _is_same_command(here[1], settings):
        decision = _look(settings, store, here[0])
        note = f"resuming from step {here[0]} of this run, which the same --resume has already reached"
        # PATH may be gone by now. This run has its own checkpoint and needs PATH only as a fallback.
        with suppress(ConfigError):
            decision = replace(decision, elsewhere=_candidates(*locate(settings.checkpoint.resume)))
        return replace(decision, changes=(*decision.changes, note))
    there, only = locate(settings.checkpoint.resume)
    same_line = _resolved(there.directory) == _resolved(store.directory)
    whole = same_line or bool(store.steps())  # move nothing for a state that turns out to be damaged
    if only is not None:
        decision = _look(settings, there, only, whole)
    else:
        # PATH may be another run, which is only read, so nothing is quarantined there.
        found = there.newest(lambda step: _look(settings, there, step, whole), warn_damaged, quarantine=False)
        if found is None:
            raise ConfigError(nothing_valid(there.directory))
        decision = found[1]
    moved_to = store.move_aside(after_step=decision.step if same_line else -1)
    return replace(decision, elsewhere=() if same_line else _candidates(there, only), moved_to=moved_to)


def _resolved(path: PurePath) -> PurePath:
    return path.resolve() if isinstance(path, Path) else path


def _candidates(there: CheckpointStore, only: int | None) -> tuple[tuple[PurePath, int], ...]:
    return tuple((there.directory, step) for step in ([only] if only is not None else there.steps()))


def _look(settings: Settings, store: CheckpointStore, step: int, whole: bool = False) -> ResumeDecision:
    """Return the decision to begin at `step`, with `whole` only after its bytes are verified.

    Raises ConfigError for a different fingerprint.
    """
    info = store.info(step)
    try:
        unknown = _check_fingerprint(settings, info, store.path(step))
    except ConfigError:
        store.verify(step)  # a damaged checkpoint is skipped, even one of another run
        raise
    if "train_samples" not in info:
        raise CorruptCheckpointError(f"the manifest of {store.path(step)} has no train_samples")
    # Data in parts of uneven lengths has more steps than whole batches. Old manifests do not say how many.
    whole_batches = int(info["train_samples"]) // settings.data.batch_size
    steps_per_epoch = int(info.get("steps_per_epoch") or whole_batches)
    planned = settings.run.steps or settings.run.epochs * steps_per_epoch
    # The task ended the run with these same planned steps.
    is_last = step >= planned or info.get("ended_of") == planned
    # A run that was stopped before its last evaluation resumes to run it.
    complete = is_last and not info.get("owes_evaluation")
    if whole or complete:
        store.verify(step)
    # If someone has changed the setting since, they want that size.
    is_as_set = _saved(info).get("micro_batch_size") == settings.data.micro_batch_size
    return ResumeDecision(
        "complete" if complete else "resume",
        step,
        needed=settings.checkpoint.resume != "auto",
        changes=(*unknown, *_changes(info, settings)),
        micro_batch=info.get("micro_batch_fits") if is_as_set else None,
    )


def _is_same_command(info: Mapping[str, Any], settings: Settings) -> bool:
    """Return True if the checkpoint was saved with these settings.

    A setting that only one of the two versions of tandem knows is not compared.
    """
    old = _saved(info)
    new = _plain(settings.to_dict())
    return "resume" in old and all(old[key] == new[key] for key in old.keys() & new.keys())


def _check_fingerprint(settings: Settings, info: Mapping[str, Any], path: PurePath) -> list[str]:
    """Raise ConfigError if fingerprints differ; return a message per setting that only one version knows."""
    old = translated(info.get("fingerprint", {}))
    new = _plain(settings.fingerprint_fields())
    known = old.keys() & new.keys()
    was, now = (_flat({key: values[key] for key in known}) for values in (old, new))
    if differing := _differing(was, now):
        raise ConfigError(
            f"cannot resume {path}: {', '.join(differing)}; restore the old value, or use "
            "another --run-dir or --resume never"
        )
    ours = settings.to_dict()
    return [
        _not_compared(key, {**new, **old}, key in old)
        for key in sorted((old.keys() - ours.keys()) | (new.keys() - old.keys()))
    ]


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {_shown_value(key, was)} and is {_shown_value(key, now)} now"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]


def _not_compared(key: str, values: Mapping[str, Any], is_saved: bool) -> str:
    lacking = "is running" if is_saved else "saved the checkpoint"
    return (
        f"{key} is {_shown_value(key, values)!r}; not compared, because the version of tandem that "
        f"{lacking} does not have this setting"
    )


def _changes(info: Mapping[str, Any], settings: Settings) -> list[str]:
    old = _saved(info)
    new = _plain(settings.to_dict())
    # These settings concern a single start, not the training.
    no_matter = {"resume", "master", "node_rank", "on_data_change"}
    same = {*settings.fingerprint_fields(), *no_matter}
    return [
        f"{key} was {_given(_shown_value(key, old))} and is {_given(_shown_value(key, new))} now"
        + (" (the last bits of the weights may differ)" if key in BITS_MAY_DIFFER else "")
        for key in new
        if key not in same and old.get(key) != new[key]
    ]


def _shown_value(name: str, values: Mapping[str, Any]) -> object:
    """Return a setting's value for a message, without secrets: more people see logs than checkpoints."""
    return hidden(values[name], is_named=is_secret(name), is_setting=True) if name in values else "not set"


def _given(value: object) -> object:
    return "not set" if value is None or value == "" else value


def _saved(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint, with s3:/bucket corrected to s3://bucket.

    Some versions of tandem saved addresses with one slash.
    """
    # The manifest counts here, not config.json. See docs/architecture.md#which-settings-count.
    saved = translated(info.get("settings", {}))
    return saved | {name: str(address(saved[name])) for name in PLACES if saved.get(name)}


def _plain(values: object) -> dict[str, Any]:
    """Convert values to the types that they have after a round trip through a manifest's JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten task_fields, {"noise": "3"} -> "task.noise": "3", so that a message can name the field."""
    fields = {f"task.{name}": value for name, value in fingerprint.get("task_fields", {}).items()}
    return {**{key: value for key, value in fingerprint.items() if key != "task_fields"}, **fields}
