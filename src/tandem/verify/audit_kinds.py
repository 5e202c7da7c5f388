"""The known kinds of resume bugs: their names and fixes. Standard library only."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tandem.verify.audit_logs import is_same


class Kind(NamedTuple):
    """A kind of resume bug, in one phrase, and its fix."""

    title: str
    fix: str


KINDS: Mapping[str, Kind] = {
    "torn": Kind(
        "a checkpoint is damaged by a kill while it is written",
        "write to another name in the same directory, then rename it with os.replace",
    ),
    "cannot-resume": Kind("the restarted program fails", "see its last line of output"),
    "hangs": Kind("the restarted program does not end", "see its last line of output"),
    "world": Kind("the number of ranks changes", "start as many ranks as before, or save what depends on it"),
    "weights": Kind(
        "the weights are not those that were saved",
        "load them with strict=True and in the saved precision; check that no averaged copy is loaded",
    ),
    "optimizer-lost": Kind("optimizer state lost", "save and load optimizer.state_dict()"),
    "optimizer-permuted": Kind(
        "optimizer state permuted between parameters",
        "pass the parameters to the optimizer in the same order in each start",
    ),
    "optimizer-differs": Kind(
        "optimizer state not restored as saved", "load optimizer.state_dict() without changing it"
    ),
    "schedule": Kind(
        "learning rate schedule not resumed",
        "save and load scheduler.state_dict(), or compute the rate from the global step",
    ),
    "data-restarts": Kind(
        "data order restarts in the middle of an epoch",
        "save the position in the epoch, and skip the batches that were used",
    ),
    "order-repeats": Kind(
        "data order of an earlier epoch repeats",
        "derive the order from the epoch: sampler.set_epoch(epoch), or a generator that is saved",
    ),
    "skipped": Kind(
        "an epoch, or the rest of one, is skipped",
        "save the next epoch to train, and the position in it if it is not complete",
    ),
    "repeated": Kind(
        "an epoch or steps are trained twice", "save the epoch to resume with, not the last one"
    ),
    "fewer-steps": Kind(
        "fewer steps than planned, with exit code 0",
        "count the steps that were done before the restart only once",
    ),
    "random": Kind(
        "random state lost (shuffling, augmentation or dropout)",
        "save and load the states of torch, random and numpy on each rank, or derive seeds from the step",
    ),
    "buffers": Kind("buffers of the model lost", "save model.state_dict(), not only its parameters"),
    "scaler": Kind("GradScaler state lost", "save and load scaler.state_dict()"),
    "ema": Kind("averaged weights (EMA) lost", "save and load the averaged copy, and its count of updates"),
    "other": Kind(
        "something else that the step depends on is not restored",
        "look for counters, hidden states and generators of your own",
    ),
}
"""The kinds in the order of a report: one may cause those after it."""

EMA = re.compile(r"(?:^|[.:_/])(?:ema|swa|shadow|averaged?|avg)(?:$|[._/])|ema_|_ema|n_averaged", re.I)
SCALER = re.compile(r"(?:^|[.:_/])(?:grad_?scaler|scaler)(?:$|[._/])|growth_tracker", re.I)
BUFFERS = re.compile(r"running_(?:mean|var)|num_batches_tracked")
RANDOM = re.compile(r"(?:^|[.:_/])(?:rng|random|cuda_rng)(?:$|[._/])|rng_state|random_state", re.I)
RATE = re.compile(r"(?:^|[._/-])(?:lr|learning_rate)(?:$|[._/-])", re.I)


class AuditFinding(NamedTuple):
    """A kind of bug with its evidence, the first step that shows it (from 1), and the rank."""

    kind: str
    evidence: str
    step: int | None = None
    rank: int = 0


def from_names(differing: Sequence[str], equal: Sequence[str]) -> list[AuditFinding]:
    """Guess the kind from the names of the tensors that differ, if tensors of other kinds are equal."""
    if not differing or not equal:
        return []
    for kind, pattern in (("ema", EMA), ("scaler", SCALER), ("buffers", BUFFERS), ("random", RANDOM)):
        if all(pattern.search(name) for name in differing):
            shown = ", ".join(f"`{name}`" for name in differing[:2])
            more = f" and {len(differing) - 2} more" if len(differing) > 2 else ""
            are = "differs" if len(differing) == 1 else "differ"
            return [AuditFinding(kind, f"only {shown}{more} {are} at the end; {len(equal)} others are equal")]
    return []


def from_logs(
    baseline: Mapping[str, Mapping[float, float]], killed: Mapping[str, Mapping[float, float]]
) -> list[AuditFinding]:
    """Find a schedule that restarts, and a log that ends early, in {name: {step: value}} of two runs."""
    found = []
    for name, before in baseline.items():
        now = killed.get(name, {})
        if not now or not before:
            continue
        other = [step for step in sorted(before) if step in now and not is_same(before[step], now[step])]
        if RATE.search(name) and other:
            at = other[0]
            text = f"`{name}` is {now[at]:.6g} instead of {before[at]:.6g} at step {at:g}"
            found.append(AuditFinding("schedule", text, int(at)))
        if max(now) < max(before):
            text = f"the log of `{name}` ends at step {max(now):g} instead of {max(before):g}"
            found.append(AuditFinding("fewer-steps", text, int(max(now))))
    return distinct(found)


def distinct(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Return the first finding of each kind, in the order of KINDS."""
    first: dict[str, AuditFinding] = {}
    for each in findings:
        first.setdefault(each.kind, each)
    return [first[kind] for kind in KINDS if kind in first]
