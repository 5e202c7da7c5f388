"""`--snapshot-every auto`: whatever steps and copies take, copies never take more than their share of it."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.distributed.whole_state import SHARE
from tandem.rank.session import RankSession
from tandem.schedule import Cadence
from tandem.training.loop import EVENTS, EventSchedule
from tandem.training.saving import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    SMALL_COPY_BYTES,
    snapshot_every,
    snapshot_interval,
)

LARGE = SMALL_COPY_BYTES + 1
SNAPSHOT = 1 << EVENTS.index("snapshot")


def cadence_of(text: str, device: str, has_memory: bool = True) -> Cadence:
    world: Any = SimpleNamespace(device=torch.device(device))
    grant: Any = SimpleNamespace(memories=[1, 2] if has_memory else [])
    strategy: Any = SimpleNamespace(shards_parameters=False, shards_state=False)
    return snapshot_every(text, world, grant, strategy)


class Rank0:
    """Rank 0's clock and decisions. On GPUs it hears of a decision after the next step, as the others do."""

    def __init__(self, device: str, text: str = "auto") -> None:
        self.device = device
        self.now = 0.0
        every: dict[str, Any] = dict.fromkeys(EVENTS, "never")
        self.schedule = EventSchedule.of(10, 10**9, **{**every, "snapshot": cadence_of(text, device)})
        self.schedule.clock = lambda: self.now
        self.intervals = list[float]()
        recorder = SimpleNamespace(snapshots_every=self.intervals.append)
        world = SimpleNamespace(device=torch.device(device))
        self.session: Any = SimpleNamespace(
            world=world, event_schedule=self.schedule, recorder=recorder
        )
        self.heard = [0] if device == "cuda" else []
        self.decided = list[float]()
        self.copies = list[float]()

    def takes_step(self, seconds: float, copy: float, size: int = LARGE) -> None:
        bits = self.schedule.decisions(True)
        if bits:
            assert bits == SNAPSHOT
            self.decided.append(self.now)
        self.heard.append(bits)
        self.now += seconds
        if self.heard.pop(0):
            self.now += copy
            self.copies.append(copy)
            if len(self.copies) > 1:  # the first one allocates memory, and is not reported
                RankSession._adapt_snapshots(self.session, size, copy)


@pytest.mark.parametrize(("device", "longest"), [("cpu", 300.0), ("cuda", 0.99 * SHORTEST_SECONDS["cuda"])])
@given(data=st.data())
def test_copies_never_take_more_than_their_share(device: str, longest: float, data: Any) -> None:
    """For any steps and copies for which LONGEST_SECONDS is enough; each copy is paid before the next one."""
    step_and_copy = st.tuples(st.floats(0.0, longest), st.floats(0.0, LONGEST_SECONDS * SHARE[device]))
    rank = Rank0(device)
    for seconds, copy in data.draw(st.lists(step_and_copy, max_size=200)):
        rank.takes_step(seconds, copy)
    measured = rank.copies[1:]
    for begin in range(len(measured)):
        for end in range(begin + 1, len(measured)):
            took = rank.decided[1 + end] - rank.decided[1 + begin]
            assert sum(measured[begin:end]) <= SHARE[device] * took + 1e-6


@given(step=st.floats(0.001, 300.0), copy=st.floats(0.0001, 1000.0), device=st.sampled_from(["cpu", "cuda"]))
def test_equal_steps_and_copies_keep_the_share_or_the_longest_interval(
    step: float, copy: float, device: str
) -> None:
    rank = Rank0(device)
    for _ in range(300):
        rank.takes_step(step, copy)
    if len(rank.decided) > 4:
        took = rank.decided[-1] - rank.decided[2]
        spent = sum(rank.copies[2 : len(rank.decided) - 1])
        count = len(rank.decided) - 3
        assert spent <= SHARE[device] * took + 1e-6 or took >= count * LONGEST_SECONDS * (1 - 1e-9)
        # As often as that allows: a step later at most, or two where decisions are heard one step late.
        interval = min(max(copy / SHARE[device], SHORTEST_SECONDS[device]), LONGEST_SECONDS)
        assert took <= count * (interval + 2 * (step + copy)) + 1e-6


@given(steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=50))
def test_a_small_state_is_copied_at_every_step_on_cpus(steps: list[tuple[float, float]]) -> None:
    rank = Rank0("cpu")
    for seconds, copy in steps:
        rank.takes_step(seconds, copy, SMALL_COPY_BYTES)
    assert len(rank.copies) == len(steps)


def test_the_interval_has_bounds() -> None:
    assert snapshot_interval("cpu", LARGE, 0.03) == pytest.approx(1.0)
    assert snapshot_interval("cuda", 1, 0.1) == pytest.approx(10.0)
    assert snapshot_interval("cuda", 1, 0.001) == SHORTEST_SECONDS["cuda"]
    assert snapshot_interval("cpu", LARGE, 100.0) == LONGEST_SECONDS
    # What a rank reports that has no memory for snapshots, while other nodes may have it.
    assert snapshot_interval("cpu", sys.maxsize, math.inf) == LONGEST_SECONDS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("text", ["200", "5s", "1epoch", "10%", "never"])
def test_an_interval_that_was_given_stays_as_it_is(text: str, device: str) -> None:
    assert cadence_of(text, device) == Cadence.parse(text)
    assert cadence_of(text, device, has_memory=False) == Cadence.parse("never")


@given(sizes=st.lists(st.tuples(st.integers(0, 2**40), st.floats(0.0, 1000.0)), max_size=20))
def test_a_gpu_is_never_copied_from_more_often_than_every_5_seconds(sizes: list[tuple[int, float]]) -> None:
    rank = Rank0("cuda")
    assert rank.schedule.cadences["snapshot"].value == 5
    for size, seconds in sizes:
        RankSession._adapt_snapshots(rank.session, size, seconds)
        assert 5 <= rank.schedule.cadences["snapshot"].value == rank.intervals[-1] <= LONGEST_SECONDS


def test_only_rank_0_decides_and_the_last_step_has_a_snapshot() -> None:
    schedule = Rank0("cpu").schedule
    assert schedule.decisions(is_first=False) == 0
    assert not schedule.is_due("snapshot", 7, None)
    assert schedule.is_due("snapshot", 10**9, None)
