"""200 shards behind a bad server, read by three ranks of a node: right samples, or a named refusal."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from range_server import RangeServer, serving
from shard_nodes import SHARDS, Node, assert_refused, assert_right, write_shards

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder)
    return folder


@pytest.fixture
def server(shards: Path) -> Iterator[RangeServer]:
    with serving(shards) as each:
        yield each


@pytest.fixture
def node(server: RangeServer, shards: Path, tmp_path: Path) -> Node:
    return Node(server.address, shards, tmp_path)


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


@pytest.fixture
def small_disk(node: Node, require: Any) -> Iterator[int]:
    """A file system for the cache that is smaller than the shards; its bytes."""
    node.cache.mkdir()
    size = 4 * 2**20
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(node.cache)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    require("mount", mounted.returncode == 0, mounted.stderr.strip())
    yield size
    subprocess.run(["umount", "--lazy", str(node.cache)], check=True)


def test_by_default_the_cache_fits_its_disk(node: Node, small_disk: int) -> None:
    assert sum(block.length for block in node.blocks) > small_disk
    for _ in range(2):  # the second time, the cache is full
        assert_right(node.epoch(cache_bytes=0))
        assert small_disk / 2 < node.most_bytes <= small_disk * 3 // 4


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
    assert_refused(node.epoch(deadline=4), kind, *words)
