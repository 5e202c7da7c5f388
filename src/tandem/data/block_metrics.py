"""The metrics of this rank's block caches: what has changed since the last log line."""

from pathlib import Path
from weakref import WeakKeyDictionary

from tandem.data.block_fetcher import SharedStatus
from tandem.data.tar_shards import open_caches
from tandem.telemetry import metrics
from tandem.telemetry.metrics import Sample


class BlockMetrics:
    """Reads the counters of all fetching processes that this rank has started."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: WeakKeyDictionary[SharedStatus, dict[str, float]] = WeakKeyDictionary()

    def __call__(self) -> list[Sample]:
        """Return the samples since the last call; empty if this rank reads from no cache."""
        new: dict[str, float] = {}
        ahead = 0
        sizes: dict[Path, int] = {}
        limits: dict[Path, int] = {}
        for dataset in open_caches():
            if (status := dataset.status()) is not None:
                for name, grown in self._grown(status).items():
                    new[name] = new.get(name, 0) + grown
                ahead += status.get("ahead")
                # Datasets may share a folder, and the limit of the last one that makes room counts.
                sizes[dataset.cache_dir] = max(status.get("cached"), sizes.get(dataset.cache_dir, 0))
                limits[dataset.cache_dir] = max(dataset.cache_bytes, limits.get(dataset.cache_dir, 0))
        if not sizes:
            return []
        return [
            *(metrics.BLOCK_REQUESTS.inc(new[name], outcome=name) for name in metrics.REQUEST_OUTCOMES),
            metrics.BLOCK_BYTES.inc(new["bytes"]),
            metrics.BLOCK_NEEDED_BYTES.inc(new["needed"]),
            metrics.BLOCK_CACHE_HITS.inc(new["hits"]),
            metrics.BLOCK_WAIT_SECONDS.inc(new["waited"]),
            metrics.BLOCKS_AHEAD.set(ahead, rank=self._rank),
            metrics.BLOCK_CACHE_BYTES.set(sum(sizes.values())),
            metrics.BLOCK_CACHE_LIMIT_BYTES.set(sum(limits.values())),
        ]

    def _grown(self, status: SharedStatus) -> dict[str, float]:
        """Return by how much the counters of a process have grown since the last call."""
        now: dict[str, float] = {
            "waited": status.waited_seconds(),
            "needed": status.needed_bytes(),
            **{name: status.get(name) for name in (*metrics.REQUEST_OUTCOMES, "bytes", "hits")},
        }
        before = self._before.get(status, {})
        self._before[status] = now
        return {name: value - before.get(name, 0) for name, value in now.items()}
