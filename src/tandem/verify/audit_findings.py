"""The kinds of resume bugs, and how an audit finds them. Standard library only.

Optimizer steps after a restart are aligned with those of an uninterrupted run. `audit_observer` has recorded
the steps. A restart resumes at the step of the uninterrupted run that starts
with the same weights. All other parts of that step must then be equal as well. If a part differs, the program
has not restored it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class Step:
    """One optimizer step, as `audit_observer` describes it."""

    opt: int = 0
    params: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    grads: str = ""
    lr: tuple[float, ...] = ()
    inputs: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    data_pass: int | None = None
    rng: tuple[tuple[str, str], ...] = ()
    buffers: str = ""
    scale: float | None = None
    world: int = 1

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Step":
        names = ("params", "state", "lr", "inputs", "rows", "indices")
        parts: dict[str, Any] = {name: tuple(line[name]) for name in names}
        parts |= {name: line[name] for name in ("opt", "grads", "buffers", "scale", "world")}
        return cls(**parts, data_pass=line["pass"], rng=tuple(sorted(line["rng"].items())))

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters in any order."""
        return tuple(sorted(self.params))

    @property
    def samples(self) -> Sequence[object]:
        """The identity of its samples: positions in the dataset, or contents."""
        return self.indices or self.rows or self.inputs


def read_steps(folder: Path) -> dict[int, list[list[Step]]]:
    """Return {rank: steps of each of its processes, in order} of one start of a program."""
    found: dict[int, list[list[Step]]] = {}
    files = sorted(folder.glob("*-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        steps = []
        # The last line may be cut off by SIGKILL.
        for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
            try:
                steps.append(Step.of(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                continue
        rank = path.name.partition("-")[0]
        if steps and rank.isdigit():
            found.setdefault(int(rank), []).append(steps)
    return found


@dataclass
class Alignment:
    """The step at which each restart resumed (1: the first; None: unknown), and the differences there."""

    resumed_at: list[int | None] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)


@dataclass(frozen=True)
class Baseline:
    """The steps of one rank in two uninterrupted runs, which show what is reproducible."""

    steps: Sequence[Step]
    again: Sequence[Step]

    def repeats(self, name: str) -> bool:
        """Return whether both runs agree on a part of all steps."""
        pairs = zip(self.steps, self.again, strict=False)
        return all(getattr(one, name) == getattr(other, name) for one, other in pairs)

    def epochs(self) -> list[int]:
        """Return the positions at which an epoch begins, the first of which is 0."""
        if all(step.data_pass is not None for step in self.steps):
            pairs = enumerate(pairwise(self.steps), 1)
            return [0, *(at for at, (one, two) in pairs if one.data_pass != two.data_pass)]
        starts = [0]
        seen: set[object] = set()
        for at, step in enumerate(self.steps):
            if seen.intersection(step.samples):
                starts.append(at)
                seen.clear()
            seen.update(step.samples)
        return starts


def align(
    baseline: Baseline, processes: Sequence[Sequence[Step]], finished: bool, rank: int = 0
) -> Alignment:
    """Compare a killed run with the baseline, on one rank.

    `processes` has the steps of the killed process and of those after it. `finished`: the last one exited
    with 0.
    """
    found = Alignment()
    history: list[Step] = list(processes[0]) if processes else []
    for number, steps in enumerate(processes[1:], 1):
        # The killed process's own steps are the best reference for a program that is not deterministic.
        reference = [*history, *baseline.steps[len(history) :]]
        at = _position(reference, steps[0])
        found.resumed_at.append(None if at is None else at + 1)
        ended = finished and number == len(processes) - 1
        if at is None:
            if baseline.repeats("params"):
                text = "the first step after the restart begins with weights of no step of the other runs"
                found.findings.append(AuditFinding("weights", text, None, rank))
            at = len(history)
        else:
            restart = _Restart(baseline, reference, len(history), steps, at, rank, ended)
            found.findings += restart.findings()
        history = [*reference[:at], *steps]
    return found


def _position(reference: Sequence[Step], first: Step) -> int | None:
    """Return the step that begins with the same weights; of several, the one most like `first`."""
    places = [
        at for at, step in enumerate(reference) if step.opt == first.opt and step.weights == first.weights
    ]

    def likeness(at: int) -> tuple[int, int]:
        step = reference[at]
        return sum(getattr(step, name) == getattr(first, name) for name in ("state", "lr", "inputs")), at

    return max(places, key=likeness, default=None)


@dataclass
class _Restart:
    """One restart that resumed at a known step; `at` is that step's position.

    `reference`: `recorded` steps of the killed processes, and then those of the baseline. `ended`: the
    process exited with 0. `moved_to`: the position in the baseline of the first batch, if it is another.
    """

    baseline: Baseline
    reference: Sequence[Step]
    recorded: int
    steps: Sequence[Step]
    at: int
    rank: int
    ended: bool
    moved_to: int | None = None

    @property
    def missing(self) -> int:
        """The number of steps missing at the end; negative if there are more than planned."""
        return len(self.baseline.steps) - self.at - len(self.steps) if self.ended else 0

    def findings(self) -> list[AuditFinding]:
        # Check the data first: its position explains a learning rate that depends on it.
        data = self._data()
        optimizer = self._optimizer()
        found = [
            *self._world(),
            *optimizer,
            # The optimizer's state contains the learning rate.
            *(self._schedule() if not optimizer else ()),
            *self._part("buffers", "buffers", "buffers of the model, such as running means, differ"),
            *self._part("scale", "scaler", "the scale of the GradScaler differs"),
            *data,
            *self._count(data),
        ]
        return found or self._random() or self._other()

    def _finding(self, kind: str, text: str, step: int | None = None) -> AuditFinding:
        return AuditFinding(kind, text, self.at + 1 if step is None else step + 1, self.rank)

    def _first(self, name: str) -> int | None:
        """Return the first of the restart's steps at which a part differs, if the part is reproducible."""
        if not self.baseline.repeats(name):
            return None
        pairs = enumerate(zip(self.steps, self.baseline.steps[self.at :], strict=False))
        return next((at for at, (one, two) in pairs if getattr(one, name) != getattr(two, name)), None)

    def _is_known(self, name: str) -> bool:
        """Return whether the reference for a part of the first step is exact."""
        return self.at < self.recorded or self.baseline.repeats(name)

    def _world(self) -> list[AuditFinding]:
        now, before = self.steps[0].world, self.reference[self.at].world
        if now == before:
            return []
        return [self._finding("world", f"{now} ranks instead of {before}")]

    def _optimizer(self) -> list[AuditFinding]:
        now, before = self.steps[0], self.reference[self.at]
        pairs = Counter(zip(now.params, now.state, strict=False))
        missing = Counter(zip(before.params, before.state, strict=False)) - pairs
        if not missing or not self._is_known("state"):
            return []
        total, count = len(before.state), missing.total()
        where = f"before step {self.at + 1}, "
        if not any(now.state):
            had = sum(map(bool, before.state))
            return [self._finding("optimizer-lost", f"{where}it has no state; {had} parameters had one")]
        if Counter(now.state) == Counter(before.state):
            return [
                self._finding(
                    "optimizer-permuted",
                    f"{where}{count} of {total} parameters have the state of another parameter",
                )
            ]
        empty = sum(not state for state in now.state) - sum(not state for state in before.state)
        if empty > 0:
            return [self._finding("optimizer-lost", f"{where}{empty} of {total} parameters have no state")]
        return [
            self._finding("optimizer-differs", f"{where}the state of {count} of {total} parameters differs")
        ]

    def _schedule(self) -> list[AuditFinding]:
        first = self._first("lr")
        if first is None:
            return []
        now, at = self.steps[first].lr, self.at + first
        if self.moved_to is not None and self.baseline.steps[self.moved_to].lr == self.steps[0].lr:
            return []
        text = f"{_shown(now)} instead of {_shown(self.baseline.steps[at].lr)} at step {at + 1}"
        count = min(len(self.steps), len(self.baseline.steps))
        if [step.lr for step in self.steps[:count]] == [step.lr for step in self.baseline.steps[:count]]:
            text += "; it is that of the first steps again"
        return [self._finding("schedule", text, at)]

    def _part(self, name: str, kind: str, text: str) -> list[AuditFinding]:
        if not self._is_known(name):
            return []
        now, before = getattr(self.steps[0], name), getattr(self.reference[self.at], name)
        return [] if now == before else [self._finding(kind, f"{text} at step {self.at + 1}")]

    def _data(self) -> list[AuditFinding]:
        """Report how the batches differ from those of the same steps."""
        first = self._first("inputs")
        if first is None:
            return []
        at, now = self.at + first, self.steps[first]
        if (
            now.indices
            and now.indices == self.baseline.steps[at].indices
            and self.baseline.repeats("indices")
        ):
            text = (
                f"step {at + 1} has the samples of the uninterrupted run with other contents (augmentation)"
            )
            return [self._finding("random", text, at)]
        starts = self.baseline.epochs()
        start = max(each for each in starts if each <= at)
        match = self._match(first, start)
        if match is not None:
            if first == 0:
                self.moved_to = match
            return [self._moved(at, match, start, starts)]
        return [self._unmatched(first, at, start, starts)]

    def _match(self, first: int, start: int) -> int | None:
        """Return the position of the baseline's step with the same batch, and the same next one."""
        # Contents may be augmented; positions in the dataset are not.
        has_indices = all(step.indices for step in (*self.baseline.steps, *self.steps))
        name = "indices" if has_indices and self.baseline.repeats("indices") else "inputs"
        wanted = [getattr(step, name) for step in self.steps[first : first + 2]]
        inputs = [getattr(step, name) for step in self.baseline.steps]
        places = [
            at for at in range(len(inputs)) if inputs[at : at + len(wanted)] == wanted[: len(inputs) - at]
        ]
        if start in places:
            return start
        return min(places, key=lambda place: abs(place - self.at - first), default=None)

    def _moved(self, at: int, match: int, start: int, starts: Sequence[int]) -> AuditFinding:
        """Describe a step that has the batch of another step of the baseline."""
        text = f"step {at + 1} has the batch of step {match + 1}"
        if match > at:
            return self._finding("skipped", f"{text}; {match - at} batches are skipped", at)
        if self.missing < 0 and at == start:
            return self._finding("repeated", f"{text}, and there are {-self.missing} steps too many", at)
        other = max(each for each in starts if each <= match)
        # It is the same place in an earlier epoch: the position is right, but the epoch's order is wrong.
        if other < start and match - other == at - start:
            return self._finding("order-repeats", f"{text}, of an earlier epoch", at)
        where = ", the first of its epoch" if match == start else ", the first of an earlier epoch"
        return self._finding("data-restarts", text + (where if match in starts else ""), at)

    def _unmatched(self, first: int, at: int, start: int, starts: Sequence[int]) -> AuditFinding:
        """Describe a step whose batch is in no step of the baseline: another order, or other samples."""
        end = next((each for each in starts if each > at), len(self.baseline.steps))
        due = Counter(_samples(self.baseline.steps[at:end]))
        got = Counter(_samples(self.steps[first : first + end - at]))
        epoch = Counter(_samples(self.baseline.steps[start:end]))
        # As many first batches of a new order are skipped as were used, so the order was lost.
        now = self.steps[first].data_pass
        has_length = now is not None and end - at == sum(step.data_pass == now for step in self.steps[first:])
        # A process that was killed early has too few steps to tell whether they were skipped.
        is_short = not self.ended and len(self.steps) - first < end - at
        is_order = at == start or is_short or (has_length and not self.missing)
        if due == got or (not got - epoch and is_order):
            text = f"the samples from step {at + 1} on have another order than in the uninterrupted run"
            return self._finding("random", text, at)
        if self.missing > 0 and at > start:
            text = f"{(due - got).total()} samples of the epoch are skipped at step {at + 1}"
            return self._finding("skipped", text, at)
        if at > start and not got - epoch - epoch:
            text = (
                f"of the {due.total()} samples left in the epoch at step {at + 1}, {(due - got).total()} are "
                "skipped, and samples that were used already are repeated"
            )
            return self._finding("data-restarts", text, at)
        return self._finding("random", f"step {at + 1} has samples that no step of the other runs has", at)

    def _count(self, data: Sequence[AuditFinding]) -> list[AuditFinding]:
        planned = len(self.baseline.steps)
        done = planned - self.missing
        if not self.missing or len(self.baseline.steps) != len(self.baseline.again):
            return []
        text = f"{done} steps instead of {planned}, with exit code 0"
        # A wrong position in an epoch also changes the number of steps.
        if any(each.kind in ("skipped", "repeated", "data-restarts") for each in data):
            return []
        if self.missing < 0:
            return [self._finding("repeated", text, planned)]
        lengths = {two - one for one, two in pairwise([*self.baseline.epochs(), planned])}
        is_epochs = len(lengths) == 1 and self.missing % lengths.pop() == 0
        kind = "skipped" if is_epochs and len(self.baseline.epochs()) > 1 else "fewer-steps"
        return [self._finding(kind, text, done)]

    def _random(self) -> list[AuditFinding]:
        """Look for a step with the same weights and batch, but other random states and gradients."""
        first = self._first("grads")
        if first is None:
            return []
        now, before = self.steps[first], self.baseline.steps[self.at + first]
        if now.weights != before.weights or now.rng == before.rng:
            return []
        names = ", ".join(sorted({name for name, _ in set(now.rng) ^ set(before.rng)}))
        text = (
            f"step {self.at + first + 1} has the same weights and batch, but other gradients; the random "
            f"state of {names} differs"
        )
        return [self._finding("random", text, self.at + first)]

    def _other(self) -> list[AuditFinding]:
        first = self._first("grads")
        # An earlier restart may have changed the weights already.
        is_same = self.steps[0].weights == self.baseline.steps[self.at].weights
        if first is None or not is_same or not self.baseline.repeats("params"):
            return []
        text = f"step {self.at + first + 1} has other gradients, with the same batch and random states"
        return [self._finding("other", text, self.at + first)]


def _samples(steps: Iterable[Step]) -> list[object]:
    return [sample for step in steps for sample in step.samples]


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
