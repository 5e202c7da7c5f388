"""Find the rank that slows down a script, on node 0, from the ranks' heartbeats.

A task's ranks exchange their times in a collective (`telemetry/stragglers.py`); a script's collectives are
its own. See docs/architecture.md#measuring-a-ranks-own-time.
"""

import logging
import time
from collections.abc import Callable, Sequence

from tandem.telemetry import metrics
from tandem.telemetry.hangs import Beat
from tandem.telemetry.messages import Message, Ranks, Samples
from tandem.telemetry.meter import PHASES
from tandem.telemetry.stragglers import RankTimes, StragglerWatch
from tandem.timeouts import SLOW_RANKS_SECONDS

log = logging.getLogger("tandem.run")


class SlowRanks:
    """Report the times of all ranks to `tell`, and a straggler to the log and to `event`.

    The ranks are compared every `pause` seconds.
    """

    def __init__(
        self,
        tell: Callable[[Message], object],
        event: Callable[..., object],
        pause: float = SLOW_RANKS_SECONDS,
    ) -> None:
        self._pause = pause
        self._tell = tell
        self._event = event
        self._watch = StragglerWatch()
        self._looked_at = 0.0

    def look(self, beats: Sequence[Beat]) -> None:
        """Compare the ranks if it is time to; do nothing if they train a task."""
        if time.monotonic() - self._looked_at < self._pause:
            return
        known = {beat.rank: beat for beat in beats if beat.own is not None and beat.quick is not None}
        if len(known) < 2 or len(known) < len(beats):
            return
        now = time.monotonic()
        seconds = now - self._looked_at
        self._looked_at = now
        report = self._watch.report([_times(beat, seconds) for _, beat in sorted(known.items())])
        unknown = metrics.RANK_DATA_SECONDS.name
        self._tell(Samples([each for each in report.samples if each.name != unknown]))
        rows = [{**row, "phases_ms": {"other": row["own_ms"]}} for row in report.page.rows]
        self._tell(Ranks(rows, report.page.says))
        if report.news is not None:
            log.warning("%s", report.news)
            self._event("straggler", **report.news.facts())


def _times(beat: Beat, seconds: float) -> RankTimes:
    own = beat.own or 0.0
    quick = beat.quick or 0.0
    phases = tuple(own if name == "other" else 0.0 for name in PHASES)
    # A script's rank does not report how long a whole step takes. It is at least its own time.
    return RankTimes(beat.rank, beat.node, own, quick, own, seconds, phases, beat.doing or "")
