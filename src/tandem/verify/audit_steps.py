"""Align the optimizer steps after a restart with those of an uninterrupted run, and find what differs.

`audit_observer` has recorded the steps. A restart resumes at the step of the uninterrupted run that starts
with the same weights. All other parts of that step must then be equal as well. If a part differs, the program
has not restored it. Standard library only.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.verify.audit_kinds import AuditFinding


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


class _Restart:
    """One restart that resumed at a known step; `at` is that step's position."""

    def __init__(
        self,
        baseline: Baseline,
        reference: Sequence[Step],
        recorded: int,
        steps: Sequence[Step],
        at: int,
        rank: int,
        ended: bool,
    ) -> None:
        """`reference`: `recorded` steps of the killed processes, and then those of the baseline."""
        self._baseline = baseline
        self._base = baseline.steps
        self._ref = reference
        self._recorded = recorded
        self._steps = steps
        self._at = at
        self._rank = rank
        self._ended = ended
        # The number of steps missing at the end; negative if there are more than planned.
        self._missing = len(self._base) - at - len(steps) if ended else 0
        self._moved_to: int | None = None

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
        return AuditFinding(kind, text, self._at + 1 if step is None else step + 1, self._rank)

    def _first(self, name: str) -> int | None:
        """Return the first of the restart's steps at which a part differs, if the part is reproducible."""
        if not self._baseline.repeats(name):
            return None
        pairs = enumerate(zip(self._steps, self._base[self._at :], strict=False))
        return next((at for at, (one, two) in pairs if getattr(one, name) != getattr(two, name)), None)

    def _is_known(self, name: str) -> bool:
        """Return whether the reference for a part of the first step is exact."""
        return self._at < self._recorded or self._baseline.repeats(name)

    def _world(self) -> list[AuditFinding]:
        now, before = self._steps[0].world, self._ref[self._at].world
        if now == before:
            return []
        return [self._finding("world", f"{now} ranks instead of {before}")]

    def _optimizer(self) -> list[AuditFinding]:
        now, before = self._steps[0], self._ref[self._at]
        pairs = Counter(zip(now.params, now.state, strict=False))
        missing = Counter(zip(before.params, before.state, strict=False)) - pairs
        if not missing or not self._is_known("state"):
            return []
        total, count = len(before.state), missing.total()
        where = f"before step {self._at + 1}, "
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
        now, at = self._steps[first].lr, self._at + first
        if self._moved_to is not None and self._base[self._moved_to].lr == self._steps[0].lr:
            return []
        text = f"{_shown(now)} instead of {_shown(self._base[at].lr)} at step {at + 1}"
        count = min(len(self._steps), len(self._base))
        if [step.lr for step in self._steps[:count]] == [step.lr for step in self._base[:count]]:
            text += "; it is that of the first steps again"
        return [self._finding("schedule", text, at)]

    def _part(self, name: str, kind: str, text: str) -> list[AuditFinding]:
        if not self._is_known(name):
            return []
        now, before = getattr(self._steps[0], name), getattr(self._ref[self._at], name)
        return [] if now == before else [self._finding(kind, f"{text} at step {self._at + 1}")]

    def _data(self) -> list[AuditFinding]:
        """Report how the batches differ from those of the same steps."""
        first = self._first("inputs")
        if first is None:
            return []
        at, now = self._at + first, self._steps[first]
        if now.indices and now.indices == self._base[at].indices and self._baseline.repeats("indices"):
            text = (
                f"step {at + 1} has the samples of the uninterrupted run with other contents (augmentation)"
            )
            return [self._finding("random", text, at)]
        starts = self._baseline.epochs()
        start = max(each for each in starts if each <= at)
        match = self._match(first, start)
        if match is not None:
            if first == 0:
                self._moved_to = match
            return [self._moved(at, match, start, starts)]
        return [self._unmatched(first, at, start, starts)]

    def _match(self, first: int, start: int) -> int | None:
        """Return the position of the baseline's step with the same batch, and the same next one."""
        # Contents may be augmented; positions in the dataset are not.
        has_indices = all(step.indices for step in (*self._base, *self._steps))
        name = "indices" if has_indices and self._baseline.repeats("indices") else "inputs"
        wanted = [getattr(step, name) for step in self._steps[first : first + 2]]
        inputs = [getattr(step, name) for step in self._base]
        places = [
            at for at in range(len(inputs)) if inputs[at : at + len(wanted)] == wanted[: len(inputs) - at]
        ]
        if start in places:
            return start
        return min(places, key=lambda place: abs(place - self._at - first), default=None)

    def _moved(self, at: int, match: int, start: int, starts: Sequence[int]) -> AuditFinding:
        """Describe a step that has the batch of another step of the baseline."""
        text = f"step {at + 1} has the batch of step {match + 1}"
        if match > at:
            return self._finding("skipped", f"{text}; {match - at} batches are skipped", at)
        if self._missing < 0 and at == start:
            return self._finding("repeated", f"{text}, and there are {-self._missing} steps too many", at)
        other = max(each for each in starts if each <= match)
        # It is the same place in an earlier epoch: the position is right, but the epoch's order is wrong.
        if other < start and match - other == at - start:
            return self._finding("order-repeats", f"{text}, of an earlier epoch", at)
        where = ", the first of its epoch" if match == start else ", the first of an earlier epoch"
        return self._finding("data-restarts", text + (where if match in starts else ""), at)

    def _unmatched(self, first: int, at: int, start: int, starts: Sequence[int]) -> AuditFinding:
        """Describe a step whose batch is in no step of the baseline: another order, or other samples."""
        end = next((each for each in starts if each > at), len(self._base))
        due = Counter(_samples(self._base[at:end]))
        got = Counter(_samples(self._steps[first : first + end - at]))
        epoch = Counter(_samples(self._base[start:end]))
        # As many first batches of a new order are skipped as were used, so the order was lost.
        now = self._steps[first].data_pass
        has_length = now is not None and end - at == sum(
            step.data_pass == now for step in self._steps[first:]
        )
        # A process that was killed early has too few steps to tell whether they were skipped.
        is_short = not self._ended and len(self._steps) - first < end - at
        is_order = at == start or is_short or (has_length and not self._missing)
        if due == got or (not got - epoch and is_order):
            text = f"the samples from step {at + 1} on have another order than in the uninterrupted run"
            return self._finding("random", text, at)
        if self._missing > 0 and at > start:
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
        planned = len(self._base)
        done = planned - self._missing
        if not self._missing or len(self._base) != len(self._baseline.again):
            return []
        text = f"{done} steps instead of {planned}, with exit code 0"
        # A wrong position in an epoch also changes the number of steps.
        if any(each.kind in ("skipped", "repeated", "data-restarts") for each in data):
            return []
        if self._missing < 0:
            return [self._finding("repeated", text, planned)]
        lengths = {two - one for one, two in pairwise([*self._baseline.epochs(), planned])}
        is_epochs = len(lengths) == 1 and self._missing % lengths.pop() == 0
        kind = "skipped" if is_epochs and len(self._baseline.epochs()) > 1 else "fewer-steps"
        return [self._finding(kind, text, done)]

    def _random(self) -> list[AuditFinding]:
        """Look for a step with the same weights and batch, but other random states and gradients."""
        first = self._first("grads")
        if first is None:
            return []
        now, before = self._steps[first], self._base[self._at + first]
        if now.weights != before.weights or now.rng == before.rng:
            return []
        names = ", ".join(sorted({name for name, _ in set(now.rng) ^ set(before.rng)}))
        text = (
            f"step {self._at + first + 1} has the same weights and batch, but other gradients; the random "
            f"state of {names} differs"
        )
        return [self._finding("random", text, self._at + first)]

    def _other(self) -> list[AuditFinding]:
        first = self._first("grads")
        # An earlier restart may have changed the weights already.
        is_same = self._steps[0].weights == self._base[self._at].weights
        if first is None or not is_same or not self._baseline.repeats("params"):
            return []
        text = f"step {self._at + first + 1} has other gradients, with the same batch and random states"
        return [self._finding("other", text, self._at + first)]


def _samples(steps: Iterable[Step]) -> list[object]:
    return [sample for step in steps for sample in step.samples]


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
