"""Who holds the others back in a script, judged on node 0 from what the ranks' heartbeats say.

A task's ranks gather their times in a collective (`telemetry/stragglers.py`); a script's collectives are its
own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.telemetry import metrics, stragglers
from tandem.telemetry.hangs import Beat
from tandem.telemetry.messages import Message, Ranks, Samples
from tandem.telemetry.stragglers import RankTimes
from tandem.timeouts import SLOW_RANKS_SECONDS

log = logging.getLogger("tandem.run")


class SlowRanks:
    """Tells the times of all ranks to `tell`; to the log and to `event` who holds the others back."""

    def __init__(self, tell: Callable[[Message], object], event: Callable[..., object]) -> None:
        self._tell, self._event = tell, event
        self._watch, self._looked_at = stragglers.StragglerWatch(), 0.0

    def look(self, beats: Sequence[Beat]) -> None:
        """At what is known of all ranks now; does nothing most of the time, and where they are a task's."""
        if time.monotonic() - self._looked_at < SLOW_RANKS_SECONDS:
            return
        known = {beat.rank: beat for beat in beats if beat.own is not None and beat.quick is not None}
        if len(known) < 2 or len(known) < len(beats):
            return
        self._looked_at = time.monotonic()
        ranks = [_times(beat) for _, beat in sorted(known.items())]
        verdict = stragglers.judge(ranks)
        verdict = replace(verdict, place=known[verdict.rank].doing or "")
        unknown = metrics.RANK_DATA_SECONDS.name
        samples = [each for each in stragglers.samples_of(ranks, verdict) if each.name != unknown]
        page = stragglers.rows_for_page(ranks, verdict)
        rows = [{**row, "phases_ms": {"other": row["own_ms"]}} for row in page.rows]
        self._tell(Samples(samples))
        self._tell(Ranks(rows, page.says))
        news = self._watch.news(verdict)
        if news is not None:
            log.warning("%s", news)
            seconds = {"own_seconds": news.slowest, "median_seconds": news.median}
            where = {"rank": news.rank, "node": news.node, "phase": news.phase, "place": news.place}
            self._event("straggler", **where, **seconds)


def _times(beat: Beat) -> RankTimes:
    own = beat.own or 0.0
    phases = {"data": 0.0, "transfer": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0, "other": own}
    return RankTimes(rank=beat.rank, node=beat.node, own=own, quick=beat.quick or 0.0, **phases)
