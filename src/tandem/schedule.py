"""Decide when something is due and what the learning rate is, as pure functions of the global step.

Nothing here has state, so a resumed run saves, evaluates and decays at the same steps as an uninterrupted
one.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, cast

CadenceUnit = Literal["steps", "epochs", "seconds", "percent", "never"]
LrScaling = Literal["none", "linear", "sqrt"]
LrSchedule = Literal["constant", "linear", "cosine", "step"]

CADENCE_VALID = "a cadence such as 200 (steps), 1epoch, 30s, 10m, 10% or never"
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}
"""The units of time that a setting may have."""
# ASCII, because \d would match the digits of other scripts.
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z]+|%)?", re.ASCII)
_UNITS: dict[str, CadenceUnit] = {
    **{"": "steps", "step": "steps", "steps": "steps"},
    **{"epoch": "epochs", "epochs": "epochs", "%": "percent"},
    **dict.fromkeys(SECONDS, "seconds"),
}


def in_seconds(value: Any) -> Any:
    """Return a time such as `90s`, `5m` or `2h` in seconds, and any other value as it is."""
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) * SECONDS[found[2]] if found and found[2] in SECONDS else value


# Where "step" decays: epochs 30, 60 and 80 of 90 (Goyal et al. 2017, arXiv:1706.02677).
STEP_MILESTONES = (30 / 90, 60 / 90, 80 / 90)
STEP_FACTOR = 0.1

BASE_BATCH_SIZE = 240
"""The default of --batch-size."""


@dataclass(frozen=True)
class Cadence:
    """How often something happens: every N steps, epochs, seconds, or percent of the planned steps."""

    value: float
    unit: CadenceUnit

    @classmethod
    def parse(cls, text: str) -> "Cadence":
        """Parse `200`, `1epoch`, `0.5epochs`, `30s`, `10m`, `10%` or `never`; zero of any unit means never.

        Raises ValueError whose text says what was expected.
        """
        if text == "never":
            return cls(0.0, "never")
        found = _NUMBER.fullmatch(text)
        if not found or (found[2] or "") not in _UNITS:
            raise ValueError(CADENCE_VALID)
        value = float(found[1]) * SECONDS.get(found[2], 1)
        unit = _UNITS[found[2] or ""]
        if value == 0:
            return cls(0.0, "never")
        if not math.isfinite(value) or (unit == "steps" and value % 1) or (unit == "percent" and value > 100):
            raise ValueError(CADENCE_VALID)
        return cls(value, unit)

    def is_due(self, step: int, steps_per_epoch: int, steps_planned: int) -> bool:
        """Return True if `step`, the number of finished steps, has just reached or passed a multiple.

        Multiples need not be integers: 10% of 1005 steps is due at 101, 201, 302, ... 1005. Always False for
        seconds and never.
        """
        period = _period_steps(self.value, self.unit, steps_per_epoch, steps_planned)
        if period is None or step < 1:
            return False
        length, parts = period
        return step * parts // length > (step - 1) * parts // length

    def is_due_by_time(self, seconds_since_last: float) -> bool:
        """Return True if an interval in seconds is due; always False for the other units."""
        return self.unit == "seconds" and seconds_since_last >= self.value

    def to_steps(self, steps_per_epoch: int, steps_planned: int) -> int | None:
        """Return the first step at which it is due, at least 1; None for seconds and never."""
        period = _period_steps(self.value, self.unit, steps_per_epoch, steps_planned)
        return None if period is None else -(-period[0] // period[1])


# Asked at each step, with the same few values.
@lru_cache(maxsize=64)
def _period_steps(
    value: float, unit: CadenceUnit, steps_per_epoch: int, steps_planned: int
) -> tuple[int, int] | None:
    """Return the steps between two multiples as a ratio of integers.

    0.7 * 10 is then 7, not 7.000000000000001.
    """
    per_unit: dict[str, Fraction | int] = {"steps": 1, "epochs": steps_per_epoch}
    per_unit["percent"] = Fraction(steps_planned, 100)
    # repr() has the decimal that the user typed; the float differs from it.
    period = Fraction(repr(value)) * per_unit.get(unit, 0)
    return period.as_integer_ratio() if period > 0 else None


def scaling_of(text: str) -> tuple[LrScaling, int]:
    """Parse `linear:256`, `sqrt` or `none` into (rule, batch size for which the learning rate was tuned).

    Linear suits SGD: Goyal et al. 2017, arXiv:1706.02677, section 2.1. Adaptive optimizers divide a gradient
    by its own size, so a batch k times larger leaves noise sqrt(k) times smaller: Malladi et al. 2022,
    arXiv:2205.10287.
    """
    rule, _, base = text.partition(":")
    return cast(LrScaling, rule), int(base or BASE_BATCH_SIZE)


def scale_lr(lr: float, rule: LrScaling, batch_size: int, base_batch_size: int) -> float:
    """Scale a learning rate that was tuned with `base_batch_size` to a global batch of `batch_size`.

    linear: Goyal et al. 2017 (SGD). sqrt: Krizhevsky 2014, arXiv:1404.5997. See `scaling_of`.
    """
    if rule == "none":
        return lr
    ratio = batch_size / base_batch_size
    return lr * (math.sqrt(ratio) if rule == "sqrt" else ratio)


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, steps_planned: int, schedule: LrSchedule
) -> float:
    """Return the learning rate of the next optimizer step (`step` counts from 0).

    Warm-up: 1/n, 2/n, ... 1 of the peak, so that no step has rate 0 and the last one has the peak (Goyal et
    al. 2017, section 2.2). After it, linear and cosine fall toward 0, which the step after the last planned
    one would reach; "step" multiplies by STEP_FACTOR at each of STEP_MILESTONES (fractions of the planned
    steps). Beyond the plan, the rate keeps its last value.
    """
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, steps_planned - warmup_steps))
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak - peak * progress
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    passed = sum(step / max(1, steps_planned) >= milestone for milestone in STEP_MILESTONES)
    return float(peak * STEP_FACTOR**passed)
