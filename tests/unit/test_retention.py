"""Which checkpoints stay, as properties of a pure function."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.checkpoint.retention import Best, Retention, Scores, why_kept

values = st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 4).map(float)  # the integers tie
runs = st.dictionaries(
    st.integers(0, 400), st.dictionaries(st.sampled_from(["accuracy", "loss"]), values), max_size=40
)
rules = st.builds(
    Retention,
    newest=st.integers(1, 5),
    best=st.none() | st.builds(Best, st.sampled_from(["accuracy", "loss", "typo"]), st.booleans()),
    every=st.none() | st.integers(1, 120),
)


@given(runs, rules)
def test_the_newest_the_best_and_the_milestones_stay(run: dict[int, Scores], rule: Retention) -> None:
    kept = why_kept(run, rule)
    assert list(kept) == sorted(kept, reverse=True) and set(kept) <= set(run)
    assert all(kept.values())
    newest = sorted(run, reverse=True)[: rule.newest]
    assert set(newest) <= set(kept)
    rest = set(kept) - set(newest)
    if rule.best is not None:
        metric, largest = rule.best.metric, rule.best.largest
        known = {s: v[metric] for s, v in run.items() if math.isfinite(v.get(metric, math.nan))}
        if known:
            top = max(known.values()) if largest else min(known.values())
            best = max(step for step in known if known[step] == top)
            assert best in kept
            rest.discard(best)
    for multiple in range(rule.every, 401, rule.every) if rule.every else ():
        within = [step for step in run if multiple <= step < multiple + rule.every]
        if within:
            assert min(within) in kept
            rest.discard(min(within))
    assert not rest, "nothing else stays"


@given(runs, rules, st.sets(st.integers(0, 400)))
def test_when_it_is_decided_does_not_matter(
    run: dict[int, Scores], rule: Retention, pruned_after: set[int]
) -> None:
    """After every save, after some, or once at the end: the same ones stay."""
    there: dict[int, Scores] = {}
    for step in sorted(run):
        there[step] = run[step]
        if step in pruned_after:
            there = {kept: there[kept] for kept in why_kept(there, rule)}
    assert why_kept(there, rule) == why_kept(run, rule)


@given(runs, rules)
def test_deciding_twice_changes_nothing(run: dict[int, Scores], rule: Retention) -> None:
    once = why_kept(run, rule)
    assert why_kept({step: run[step] for step in once}, rule) == once


def test_reasons_are_words() -> None:
    run: dict[int, Scores] = {100: {"accuracy": 0.9}, 200: {"accuracy": 0.95}, 300: {}, 400: {}, 450: {}}
    rule = Retention(newest=2, best=Best("accuracy", True), every=200)
    assert why_kept(run, rule) == {
        450: ["newest"],
        400: ["newest", "every 200"],
        200: ["best accuracy:max", "every 200"],
    }
    assert why_kept({}, rule) == {}
    assert why_kept(run, Retention(newest=0)) == {450: ["newest"]}, "the newest always stays"


def test_a_clock_that_misses_every_multiple_leaves_a_trail() -> None:
    run: dict[int, Scores] = {step: {} for step in (30, 95, 103, 170, 204, 260, 291, 333)}
    assert list(why_kept(run, Retention(newest=1, every=100))) == [333, 204, 103]


@pytest.mark.parametrize(
    "text, metric, largest",
    [
        ("accuracy", "accuracy", True),
        ("loss", "loss", False),
        ("val_loss", "val_loss", False),
        ("Perplexity", "Perplexity", False),
        ("loss:max", "loss", True),
        ("accuracy:min", "accuracy", False),
    ],
)
def test_best_is_read(text: str, metric: str, largest: bool) -> None:
    assert Best.parse(text) == Best(metric, largest)
    assert Best.parse(str(Best.parse(text))) == Best(metric, largest)


@pytest.mark.parametrize("text", ["", ":min", "accuracy:", "accuracy:best", "a:min:max"])
def test_best_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="METRIC:min"):
        Best.parse(text)


def test_retention_of_settings() -> None:
    settings = SimpleNamespace(checkpoint_keep=2, keep_best="loss", keep_every=500)
    assert Retention.of(settings) == Retention(2, Best("loss", False), 500)
    settings = SimpleNamespace(checkpoint_keep=3, keep_best=None, keep_every=None)
    assert Retention.of(settings) == Retention()
