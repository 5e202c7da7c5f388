"""200 shards behind a bad server, read by three ranks of a node: right samples, or a named refusal."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from program_files import PROGRAMS
from programs.shard_trial_reader import payload
from range_server import RangeServer, serving
from shards import write_shard
from tandem.data.block_cache import LOCKS
from tandem.data.tar_index import index_shards, read_index

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

SHARDS = 200
SAMPLES = 12
"""Of a shard."""
BATCH = 48
RANKS = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        numbers = range(shard * SAMPLES, (shard + 1) * SAMPLES)
        write_shard(folder / f"{shard:03}.tar", [(f"{number:05}.bin", payload(number)) for number in numbers])
    names = sorted(str(path) for path in folder.glob("*.tar"))
    index_shards(names, folder / "index.jsonl", 14_000)  # two blocks of a shard
    return folder


@pytest.fixture
def server(shards: Path) -> Iterator[RangeServer]:
    with serving(shards) as each:
        yield each


class Node:
    """The cache and the index of a node, whose ranks read from the server."""

    def __init__(self, server: RangeServer, shards: Path, folder: Path) -> None:
        self.index = folder / "index.jsonl"
        self.cache = folder / "cache"
        local = (shards / "index.jsonl").read_text()
        self.index.write_text(local.replace('"address": "', f'"address": "{server.address}/'))
        self.blocks = read_index(self.index)
        self.most_bytes = 0

    def epoch(self, cache_bytes: int = 10**9, deadline: float = 120) -> list[dict[str, Any]]:
        """What each rank has read, and why it ended; the size of the cache is sampled meanwhile."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        given = map(str, (self.index, self.cache, cache_bytes, patient(deadline)))
        command = [sys.executable, str(PROGRAMS / "shard_trial_reader.py"), *given]
        ranks = [
            subprocess.Popen([*command, str(rank), str(RANKS), str(BATCH)], stdout=subprocess.PIPE,
                             text=True, env=environment)
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            while any(rank.poll() is None for rank in ranks):
                self.most_bytes = max(self.most_bytes, self._size())
            return [json.loads(rank.communicate(timeout=patient(60))[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    def _size(self) -> int:
        size = 0
        for path in self.cache.iterdir() if self.cache.exists() else ():
            try:
                size += path.stat().st_blocks * 512 if path.name != LOCKS else 0
            except FileNotFoundError:
                pass
        return size


@pytest.fixture
def node(server: RangeServer, shards: Path, tmp_path: Path) -> Node:
    return Node(server, shards, tmp_path)


def assert_right(ranks: list[dict[str, Any]]) -> None:
    """Every sample of the epoch came once, and as it was written."""
    assert [(rank["error"], rank["wrong"]) for rank in ranks] == [([], 0)] * RANKS
    numbers = [number for rank in ranks for number in rank["numbers"]]
    assert sorted(numbers) == list(range(SHARDS * SAMPLES))


def test_each_block_is_requested_once_by_three_ranks(node: Node, server: RangeServer) -> None:
    server.faults.delay = 0.03
    assert_right(node.epoch())
    ranges = (f"bytes={block.offset}-{block.offset + block.length - 1}" for block in node.blocks)
    names = (Path(block.address).name for block in node.blocks)
    assert dict(server.requests) == {f"{name} {asked}": 1 for name, asked in zip(names, ranges, strict=True)}
    assert len(node.blocks) == 2 * SHARDS


def test_the_cap_is_never_exceeded(node: Node, server: RangeServer) -> None:
    limit = sum(-(-block.length // 4096) * 4096 for block in node.blocks) * 2 // 3
    assert_right(node.epoch(cache_bytes=limit))
    assert limit / 2 < node.most_bytes <= limit


@pytest.mark.parametrize(
    ("fault", "value"),
    [("share_500", 0.2), ("share_resets", 0.2), ("share_flipped", 0.02), ("stalling", {"007.tar"})],
)
def test_what_passes_changes_no_sample(node: Node, server: RangeServer, fault: str, value: Any) -> None:
    setattr(server.faults, fault, value)
    server.faults.stalls_once = True
    assert_right(node.epoch())
    assert sum(server.requests.values()) > len(node.blocks)


@pytest.mark.parametrize(
    ("fault", "value", "kind", "words"),
    [
        ("missing", {"007.tar"}, "ConfigError", ("007.tar", "404")),
        ("flipped", {"007.tar"}, "ConfigError", ("007.tar", "CRC-32", "bytes")),
        ("no_ranges", True, "ConfigError", (".tar", "ranges")),
        ("always_500", {"007.tar"}, "DataUnavailableError", ("007.tar", "bytes", "500")),
        ("stalling", {"007.tar"}, "DataUnavailableError", ("007.tar", "bytes", "timed out")),
    ],
)
def test_what_lasts_is_refused_by_name_after_right_samples(
    node: Node, server: RangeServer, fault: str, value: Any, kind: str, words: tuple[str, ...]
) -> None:
    setattr(server.faults, fault, value)
    ranks = node.epoch(deadline=4)
    assert not any(rank["wrong"] for rank in ranks)
    errors = [rank["error"] for rank in ranks if rank["error"]]
    assert errors and all(error[0] == kind for error in errors), ranks
    assert all(word in error[1] for error in errors for word in words), errors
    # A rank that needs nothing from that shard reads all of its part.
    whole = [len(rank["numbers"]) for rank in ranks if not rank["error"]]
    assert whole == [SHARDS * SAMPLES // RANKS] * len(whole)
