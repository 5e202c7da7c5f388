"""Decide which checkpoints are kept, as a pure function of steps and scores. `store.prune` deletes the rest.

The result is the same whether it is applied after every save or once at the end, so a restart in between
makes no difference.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.config.slices import CheckpointConfig

LOWER_IS_BETTER = ("loss", "error", "perplexity")  # suffixes of score names

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Best:
    """The score whose best checkpoint is kept, such as accuracy, and whether larger is better."""

    metric: str
    largest: bool

    @classmethod
    def parse(cls, text: str) -> "Best":
        """Parse `accuracy`, `accuracy:max` or `loss:min`. Raises ValueError for anything else.

        Without :min or :max, the name decides: names that end in loss, error or perplexity are better when
        smaller, all others when larger.
        """
        metric, colon, end = text.partition(":")
        if not metric or (colon and end not in ("min", "max")):
            raise ValueError(
                f"invalid value {text!r}; expected METRIC, METRIC:min or METRIC:max, such as accuracy"
            )
        return cls(metric, end == "max" if end else not metric.lower().endswith(LOWER_IS_BETTER))

    def step(self, scores: Mapping[int, Scores]) -> int | None:
        """Return the step with the best finite score, the latest of equal ones; None if there is none."""
        found = [
            (value if self.largest else -value, step)
            for step, by_name in scores.items()
            if math.isfinite(value := by_name.get(self.metric, math.nan))
        ]
        return max(found)[1] if found else None

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.largest else 'min'}"


@dataclass(frozen=True)
class Retention:
    """The rule: keep the `newest` checkpoints (at least 1), the best by a score, one per `every` steps."""

    newest: int = 3
    best: Best | None = None
    every: int | None = None

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Retention":
        """Create the rule from the settings."""
        best = config.keep_best
        return cls(config.checkpoint_keep, Best.parse(best) if best else None, config.keep_every)


def why_kept(scores: Mapping[int, Scores], rule: Retention) -> dict[int, list[str]]:
    """Return the steps to keep, newest first, with reasons: "newest", "best accuracy:max", "every 1000".

    `scores` has every existing step, with the scores of the evaluation at exactly that step (empty if there
    was none). For every N steps, the first checkpoint at or after each multiple is kept. A save interval in
    seconds, which rarely hits a multiple, therefore also leaves a trail. Nothing before step N is kept for
    this reason.
    """
    reasons: dict[int, list[str]] = {}
    # At least the newest one is kept, because a run resumes from it.
    for step in sorted(scores, reverse=True)[: max(rule.newest, 1)]:
        reasons.setdefault(step, []).append("newest")
    if rule.best is not None and (best := rule.best.step(scores)) is not None:
        reasons.setdefault(best, []).append(f"best {rule.best}")
    for step in _milestones(scores, rule.every) if rule.every else ():
        reasons.setdefault(step, []).append(f"every {rule.every}")
    return dict(sorted(reasons.items(), reverse=True))


def _milestones(steps: Iterable[int], every: int) -> list[int]:
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return [step for multiple, step in first.items() if multiple >= 1]
