"""Compare the outputs of a killed run with those of uninterrupted runs: tensors and numbers, bit by bit.

Two uninterrupted runs show which values the program itself does not reproduce. If a value differs between
them, a killed run's value may differ from theirs by the same amount.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import torch
from torch import Tensor

from tandem.verify.audit_files import Leaf, UnreadableError, has_tensors, read
from tandem.verify.audit_logs import TIMES, is_same, key_of

FACTOR = 3.0
"""A difference of at most this many times the distance of the two uninterrupted runs counts as noise."""
TOO_NOISY = 0.05
"""If two uninterrupted runs differ by more than this, relative to the values, a comparison proves nothing."""
Series = Mapping[str, Mapping[float, float]]
"""{name of a logged value: {step: value}}."""


@dataclass(frozen=True)
class RunOutputs:
    """The outputs of a run: its directory, the files that it wrote there, and the values in its logs."""

    folder: Path
    files: Sequence[PurePath]
    logs: Series

    def tensor_files(self) -> dict[str, PurePath]:
        """Return {name: path}; a file of a restart may be in another directory version_N."""
        return {key_of(path): path for path in sorted(self.files, key=str) if has_tensors(path)}


@dataclass
class Difference:
    """How a run differs from the baseline. Names of tensors are FILE:NAME."""

    missing: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    logs: list[tuple[float, str, float | None, float]] = field(default_factory=list)
    """(step, name, value or None if it is missing, the baseline's value): the first of each name."""
    within_noise: int = 0
    lost: int = 0
    """Numbers missing in the middle of a log: the kill came before they were written."""

    @property
    def first_step(self) -> float | None:
        return min((step for step, *_ in self.logs), default=None)

    def __bool__(self) -> bool:
        return bool(self.missing or self.tensors or self.logs)

    def __str__(self) -> str:
        parts = []
        if self.logs:
            step, name, now, before = min(self.logs, key=lambda each: each[0])
            value = "missing" if now is None else f"{now:.9g}"
            parts.append(f"`{name}` differs from step {step:g} on: {value} instead of {before:.9g}")
        if self.missing:
            parts.append(f"{', '.join(self.missing[:3])} missing")
        if self.tensors:
            total = len(self.tensors) + len(self.equal)
            differ = "differs" if len(self.tensors) == 1 else "differ"
            parts.append(
                f"{len(self.tensors)} of {total} values in files {differ}, first `{self.tensors[0]}`"
            )
        return "; ".join(parts)


class Reference:
    """Two uninterrupted runs, and the distance between them for each value that differs."""

    def __init__(self, one: RunOutputs, other: RunOutputs) -> None:
        self._one = one
        self._other = other
        self._noise: dict[str, float] = {}
        self.unreadable: list[str] = []
        self.count = 0
        ours, theirs = one.tensor_files(), other.tensor_files()
        # A file that only one of two equal runs has proves nothing.
        self._files = {key: path for key, path in ours.items() if key in theirs}
        for key, path in self._files.items():
            try:
                first, second = read(one.folder / path), read(other.folder / theirs[key])
            except UnreadableError as error:
                self.unreadable.append(str(error))
                continue
            self.count += len(first)
            for name in first.keys() & second.keys():
                if not is_equal(first[name], second[name]):
                    self._noise[f"{key}:{name}"] = distance(first[name], second[name])
        for name, series in one.logs.items():
            pairs = [(value, other.logs.get(name, {}).get(step)) for step, value in series.items()]
            apart = [distance(ours, its) for ours, its in pairs if its is not None and not is_same(ours, its)]
            if apart:
                self._noise[name] = max(apart)

    @property
    def is_exact(self) -> bool:
        return not self._noise

    @property
    def largest(self) -> tuple[float, str]:
        """The largest relative distance between the two runs, and the value's name; times are left out."""
        known = ((away, name) for name, away in self._noise.items() if not TIMES.search(name))
        return max(known, default=(0.0, ""))

    def compare(self, killed: RunOutputs) -> Difference:
        """Compare the files and logs of a killed run with those of both uninterrupted runs."""
        found = Difference()
        theirs = killed.tensor_files()
        for key, path in self._files.items():
            if key not in theirs:
                found.missing.append(key)
                continue
            try:
                before = read(self._one.folder / path)
                now = read(killed.folder / theirs[key])
            except UnreadableError as error:
                if not any(str(error) == each for each in self.unreadable):
                    found.missing.append(str(error))
                continue
            self._compare_files(found, key, before, now)
        self._compare_logs(found, killed.logs)
        return found

    def _compare_files(
        self, found: Difference, key: str, before: Mapping[str, Leaf], now: Mapping[str, Leaf]
    ) -> None:
        for name in dict.fromkeys([*before, *now]):
            full = f"{key}:{name}"
            if name in before and name in now and is_equal(before[name], now[name]):
                found.equal.append(full)
            elif name in before and name in now and self._is_noise(full, before[name], now[name]):
                found.within_noise += 1
            else:
                found.tensors.append(full)

    def _compare_logs(self, found: Difference, killed: Series) -> None:
        for name, series in self._one.logs.items():
            theirs = killed.get(name, {})
            for step in sorted(series):
                before, now = series[step], theirs.get(step)
                if now is not None and is_same(before, now):
                    continue
                if now is not None and self._is_noise(name, before, now):
                    found.within_noise += 1
                elif now is None and step < max(theirs, default=step):
                    found.lost += step in self._other.logs.get(name, {})
                # A step that only one of two equal runs has logged proves nothing.
                elif now is not None or step in self._other.logs.get(name, {}):
                    found.logs.append((step, name, now, before))
                    break

    def _is_noise(self, name: str, before: Leaf, now: Leaf) -> bool:
        if TIMES.search(name):
            return True
        return name in self._noise and distance(before, now) <= FACTOR * self._noise[name]


def is_equal(one: Leaf, other: Leaf) -> bool:
    """Compare two values bit by bit, so that NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(_raw(one), _raw(other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return one == other or (one != one and other != other)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def distance(one: Leaf, other: Leaf) -> float:
    """Return the relative distance of two values; infinity if their shapes differ or they are integers.

    Integers such as random states and counters have no small differences.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
            return math.inf
        ours, theirs = one.double(), other.double()
        size = max(float(ours.norm()), float(theirs.norm()))
        return float((ours - theirs).norm()) / size if size > 0 else 0.0
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return math.inf
    size = max(abs(one), abs(other))
    return abs(one - other) / size if size > 0 else 0.0


def damaged(folder: Path, files: Iterable[PurePath]) -> list[str]:
    """Return the names of files that cannot be read, because the program was killed while it wrote them."""
    found = []
    for path in files:
        if has_tensors(path):
            try:
                read(folder / path)
            except UnreadableError:
                found.append(str(path))
    return found
