"""The metrics of this rank's block caches: what has changed since the last log line."""

from tandem.data.tar_shards import open_caches
from tandem.telemetry import metrics
from tandem.telemetry.metrics import Sample


class BlockMetrics:
    """Reads the counters of all fetching processes that this rank has started."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: dict[str, float] = {}

    def __call__(self) -> list[Sample]:
        """Return the samples since the last call; empty if this rank reads from no cache."""
        found = [status for dataset in open_caches() if (status := dataset.status()) is not None]
        if not found:
            return []
        now: dict[str, float] = {"waited": sum(status.waited_seconds() for status in found)}
        for name in (*metrics.REQUEST_OUTCOMES, "bytes", "hits"):
            now[name] = sum(status.get(name) for status in found)
        # A dataset that was closed takes its counters with it.
        new = {name: max(0.0, value - self._before.get(name, 0)) for name, value in now.items()}
        self._before = now
        return [
            *(metrics.BLOCK_REQUESTS.inc(new[name], outcome=name) for name in metrics.REQUEST_OUTCOMES),
            metrics.BLOCK_BYTES.inc(new["bytes"]),
            metrics.BLOCK_CACHE_HITS.inc(new["hits"]),
            metrics.BLOCK_WAIT_SECONDS.inc(new["waited"]),
            metrics.BLOCKS_AHEAD.set(sum(status.get("ahead") for status in found), rank=self._rank),
            metrics.BLOCK_CACHE_BYTES.set(max(status.get("cached") for status in found)),
        ]
