"""Hangs, by name: which rank, on which node, in which phase of which step, and since when; pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.telemetry.clock import STEP_PHASES
from tandem.telemetry.messages import Heartbeat


@dataclass(frozen=True, kw_only=True)
class Beat(Heartbeat):
    """What is known of a rank: its last heartbeat, where it came from, and how many seconds ago (`silent`).

    `halted`: it cannot be heard, because its process is stopped or its node is unreachable.
    """

    node: int
    node_name: str
    silent: float = 0.0
    halted: bool = False

    def later(self, seconds: float, halted: bool) -> "Beat":
        """The same words, heard some seconds ago."""
        return replace(self, quiet=self.quiet + seconds, silent=self.silent + seconds, halted=halted)


@dataclass(frozen=True)
class Alarm:
    """A hang: the rank that holds the others up, and the line that says so."""

    rank: int
    node: int
    phase: str
    step: int
    seconds: float
    text: str


def judge(beats: Sequence[Beat]) -> Alarm | None:
    """The rank that holds up the world, or None as long as nobody is overdue.

    1. Somebody cannot be heard for longer than a hang: that rank.
    2. Somebody is not in a collective: the others wait for it. Overdue, it is named; until then all is well.
    3. All stand in collectives for longer than they may: they stand in different ones. Named is the rank that
       is out of line with most; of two, the one that is ahead, because it left one out.
    """
    gone = [beat for beat in beats if beat.halted and beat.silent > beat.hang]
    if gone:
        first = max(gone, key=lambda beat: (beat.silent, -beat.rank))
        return _alarm(first, first.silent, "cannot be heard")
    busy = [beat for beat in beats if not beat.waiting]
    if busy:
        overdue = [beat for beat in busy if beat.quiet > beat.limit]
        if not overdue:
            return None
        last = min(overdue, key=lambda beat: (beat.step, -beat.quiet))
        return _alarm(last, last.quiet, "does not get on")
    if not beats or any(beat.quiet <= beat.limit for beat in beats):
        return None
    places = Counter((beat.step, _order(beat.phase)) for beat in beats)
    odd = min(
        beats, key=lambda beat: (places[beat.step, _order(beat.phase)], -beat.step, -_order(beat.phase))
    )
    return _alarm(odd, odd.quiet, "waits in another collective than the others")


def _order(phase: str) -> int:
    return STEP_PHASES.index(phase) if phase in STEP_PHASES else len(STEP_PHASES)


def _alarm(beat: Beat, seconds: float, what: str) -> Alarm:
    text = (
        f"hang: rank {beat.rank} on node {beat.node} ({beat.node_name}) {what} since {seconds:.1f} s, "
        f"in phase {beat.phase} of step {beat.step}"
    )
    return Alarm(beat.rank, beat.node, beat.phase, beat.step, round(seconds, 1), text)
