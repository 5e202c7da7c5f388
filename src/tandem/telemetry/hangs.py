"""Attribute hangs: which rank, on which node, in which phase of which step, and for how long. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.telemetry.clock import STEP_PHASES
from tandem.telemetry.messages import Heartbeat
from tandem.timeouts import AGAIN_SECONDS, IDLE_HANG_SECONDS, SHORTEST_HANG_SECONDS, STARTING_HANG_SECONDS

# How long a rank may be silent, idle or busy before it counts as hung.

STEPS_PER_HANG = 5
LONGEST_PER_HANG = 2


@dataclass(frozen=True)
class HangLimits:
    """Time limits of a rank: --hang-timeout, or (None: auto) limits derived from the run's steps.

    `patience` is --phase-timeout. A stopped process, or one that sends no heartbeat, is recognized within
    seconds. A thread that neither computes nor runs Python may be uploading a file or waiting for a lock that
    is never released; only time distinguishes these, so it gets minutes. A thread that computes gets as long
    as an evaluation.
    """

    hang_timeout: float | None
    patience: float

    def silence_limit(self, typical_step: float | None) -> float:
        """Return the limit for silence, and for waits in different collectives; None: not trained yet."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        if typical_step is None:  # imports and compilation may starve the heartbeat thread
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * typical_step)

    def idle_limit(self, longest_step: float) -> float:
        """Return the limit for a rank that trains but shows no work."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        # Do not use the typical step: a step that compiled or waited for a volume may recur, and is no hang.
        return max(IDLE_HANG_SECONDS, LONGEST_PER_HANG * longest_step)

    def phase_limit(self, trains: bool) -> float:
        """Return the limit for a whole phase; that of a step if the rank `trains`."""
        return self.hang_timeout if trains and self.hang_timeout is not None else self.patience


ELSEWHERE = "has waited in a different collective than the others"
NEAR_STEPS = 1  # ranks that wait for each other may differ by one in their step count


@dataclass(frozen=True, kw_only=True)
class Beat(Heartbeat):
    """A rank's last heartbeat, with its origin and its age in seconds (`silent`).

    `halted`: no heartbeat can arrive, because its process is stopped or its node unreachable.
    """

    node: int
    node_name: str
    silent: float = 0.0
    halted: bool = False

    def later(self, seconds: float, idle: float, halted: bool) -> "Beat":
        """Return the heartbeat as of `seconds` later; the last `idle` of these seconds showed no work."""
        return replace(
            self,
            quiet=self.quiet + seconds,
            idle=idle if idle < seconds else self.idle + seconds,
            silent=self.silent + seconds,
            halted=halted,
        )

    @property
    def trains(self) -> bool:
        """True if the rank is in a step, and has finished one before."""
        return self.trained and self.activity == "train"


@dataclass(frozen=True)
class Alarm:
    """A hang: the rank that blocks the others, and the message about it.

    `halted`: it could not send heartbeats, which may not recur in the next generation. `together`: all wait
    for each other, and the reported rank depends on the progress of each. `again`: the same hang occurred
    before.
    """

    rank: int
    node: int
    phase: str
    step: int
    seconds: float
    text: str
    halted: bool = False
    together: bool = False
    again: bool = False


@dataclass(frozen=True)
class HangHistory:
    """Results of a run's earlier generations: the last hang, and the longest limit from their step times."""

    hang: Alarm | None = None
    idle_limit: float = 0.0

    def after(self, alarm: Alarm | None, beats: Sequence[Beat]) -> "HangHistory":
        """Return this history, extended by the results of one more generation."""
        hang = self.hang if alarm is None or alarm.halted else alarm
        return HangHistory(hang, max([self.idle_limit, *(beat.idle_limit for beat in beats if beat.trains)]))

    def applied_to(self, beats: Sequence[Beat]) -> list[Beat]:
        """Return the heartbeats with the limits that result from this history."""
        hang = self.hang
        exists = hang is not None and any(_is_at(hang, beat) for beat in beats)
        return [self._of(beat, exists) for beat in beats]

    def is_again(self, alarm: Alarm) -> bool:
        """Return True if this is the hang of an earlier generation."""
        hang = self.hang
        if hang is None or alarm.halted or alarm.together != hang.together:
            return False
        is_line = alarm.step == 0 and _is_same_line(alarm.phase, hang.phase)
        if hang.together:
            return is_line or _is_near(alarm.step, hang)
        return alarm.rank == hang.rank and (is_line or alarm.step == hang.step)

    def _of(self, beat: Beat, exists: bool) -> Beat:
        if exists and self.hang is not None and (beat.waiting or beat.rank == self.hang.rank):
            # A limit above that of a start comes only from --hang-timeout or long steps. AGAIN_SECONDS would
            # be too short for both.
            limit = beat.hang if beat.hang > STARTING_HANG_SECONDS else AGAIN_SECONDS
            return replace(beat, idle_limit=min(beat.idle_limit, limit))
        # With --hang-timeout both limits are equal, and the user's value counts.
        is_auto = beat.trains and beat.idle_limit > beat.hang
        return replace(beat, idle_limit=max(beat.idle_limit, self.idle_limit)) if is_auto else beat


NOTHING_BEFORE = HangHistory()


def find_hung_rank(beats: Sequence[Beat], past: HangHistory = NOTHING_BEFORE) -> Alarm | None:
    """Return an alarm for the rank that blocks all others, or None while no rank is overdue.

    1. A rank has sent nothing for longer than a hang: report that rank.
    2. A rank is not in a collective: the others wait for it. It is reported if it is overdue; until then, all
       is well.
    3. All wait in collectives for longer than they may; if these differ, the limit is short. The reported
       rank is the one that differs from the most others; of two, the one that is ahead, because it skipped a
       collective.
    """
    gone = [beat for beat in beats if beat.halted and beat.silent > beat.hang]
    if gone:
        first = max(gone, key=lambda beat: (beat.silent, -beat.rank))
        return replace(_alarm(first, first.silent, "has sent no heartbeat"), halted=True)
    found = _overdue(past.applied_to(beats))
    if found is None:
        return None
    beat, what = found
    alarm = _alarm(beat, beat.quiet if beat.quiet > beat.limit else beat.idle, what)
    alarm = replace(alarm, together=beat.waiting)
    if past.is_again(alarm):
        text = f"{alarm.text}; the same hang as in an earlier generation, so restarting does not help"
        return replace(alarm, again=True, text=text)
    if what == ELSEWHERE:
        return alarm
    option = "--hang-timeout" if beat.trains else "--phase-timeout"
    # Suggest twice the observed time, so that the new value does not fail at once.
    longer = 10 * math.ceil(alarm.seconds / 5)
    return replace(
        alarm, text=f"{alarm.text}; if this work is meant to take that long, use {option} {longer}"
    )


def _overdue(beats: Sequence[Beat]) -> tuple[Beat, str] | None:
    """Return the rank found by rule 2 or 3, and the reason."""
    busy = [beat for beat in beats if not beat.waiting]
    if busy:
        overdue = [beat for beat in busy if beat.quiet > beat.limit or beat.idle > beat.idle_limit]
        if not overdue:
            return None
        # The others wait for the rank with the fewest steps. See docs/architecture.md#hangs.
        last = min(overdue, key=lambda beat: (beat.step, -beat.quiet))
        return last, "has made no progress"
    positions = Counter(map(_position, beats))
    for beat in beats:
        limit = beat.hang if len(positions) > 1 and beat.trains else beat.idle_limit
        # One late rank is enough: the collective may still complete.
        if beat.idle <= min(limit, beat.idle_limit) and beat.quiet <= beat.limit:
            return None
    if not beats:
        return None
    odd = min(beats, key=lambda beat: (positions[_position(beat)], -beat.step, -_order(beat.phase)))
    return odd, ELSEWHERE if len(positions) > 1 else "has waited together with all other ranks"


def _position(beat: Beat) -> tuple[int, int | str]:
    order = _order(beat.phase)
    return beat.step, beat.phase if order == len(STEP_PHASES) else order


def _order(phase: str) -> int:
    # Lines of a script have no order.
    return STEP_PHASES.index(phase) if phase in STEP_PHASES else len(STEP_PHASES)


def _is_at(hang: Alarm, beat: Beat) -> bool:
    """Return True if this rank is at the position of that hang.

    A script counts its steps from 0 again, so its position is compared by source line.
    """
    if beat.rank != hang.rank and not (hang.together and beat.waiting):
        return False
    exists = _is_near(beat.step, hang) if hang.together else beat.step == hang.step
    return (beat.activity == "train" and exists) or (
        not beat.trained and _is_same_line(beat.phase, hang.phase)
    )


def _is_near(step: int, hang: Alarm) -> bool:
    return abs(step - hang.step) <= NEAR_STEPS


def _is_same_line(one: str, other: str) -> bool:
    # Only a script's phase, which is a source line, has a colon. The phases of a task recur in every step.
    return one == other and ":" in one


def _alarm(beat: Beat, seconds: float, what: str) -> Alarm:
    text = (
        f"hang: rank {beat.rank} on node {beat.node} ({beat.node_name}) {what} for {seconds:.1f} s "
        f"(phase {beat.phase}, step {beat.step})"
    )
    return Alarm(beat.rank, beat.node, beat.phase, beat.step, round(seconds, 1), text)
