"""Collect the live page's table of data on object stores: a row for each node whose ranks read blocks."""

from collections.abc import Mapping

from tandem.telemetry import metrics
from tandem.telemetry.metrics import Family
from tandem.telemetry.registry import Registry

COLUMNS: Mapping[str, tuple[Family, Mapping[str, str]]] = {
    "bytes": (metrics.BLOCK_BYTES, {}),
    "needed_bytes": (metrics.BLOCK_NEEDED_BYTES, {}),
    **{name: (metrics.BLOCK_REQUESTS, {"outcome": name}) for name in metrics.REQUEST_OUTCOMES},
    "wait_seconds": (metrics.BLOCK_WAIT_SECONDS, {}),
    "ahead": (metrics.BLOCKS_AHEAD, {}),
    "hits": (metrics.BLOCK_CACHE_HITS, {}),
    "cache_bytes": (metrics.BLOCK_CACHE_BYTES, {}),
    "cache_limit_bytes": (metrics.BLOCK_CACHE_LIMIT_BYTES, {}),
}
"""Each column by its metric and the labels of its series. Counters count since the launch."""


def block_reads(registry: Registry) -> list[dict[str, float]]:
    """Return {"node", and COLUMNS} for each node that reads from object stores; empty if none does."""
    found = {name: registry.by_node(family, **labels) for name, (family, labels) in COLUMNS.items()}
    # The request counters of this node's agent exist from the start, as zeros.
    nodes = sorted(found["bytes"])
    return [
        {"node": node, **{name: values.get(node, 0.0) for name, values in found.items()}} for node in nodes
    ]
