"""200 shards in a failing object store, read by three ranks of a node: right samples, or a named refusal."""

from pathlib import Path

import fsspec
import pytest
from servers import ObjectServer

from shard_nodes import Node, assert_refused, assert_right, write_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder)
    return folder


@pytest.fixture
def node(store_address: str, shards: Path, tmp_path: Path) -> Node:
    tars = sorted(shards.glob("*.tar"))
    objects = [f"{store_address}/{path.name}" for path in tars]
    fsspec.filesystem("s3", skip_instance_cache=True).put(list(map(str, tars)), objects)
    return Node(store_address, shards, tmp_path)


@pytest.mark.parametrize("rule", ["500", "reset", "cut answer"])
def test_what_passes_changes_no_sample(node: Node, server: ObjectServer, rule: str) -> None:
    server.damage(rule, every=5)
    assert_right(node.epoch())


def test_what_lasts_is_refused_by_name(node: Node, store_address: str) -> None:
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    whole = store.cat_file(f"{store_address}/007.tar")
    store.pipe_file(f"{store_address}/007.tar", whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    assert_refused(node.epoch(), "ConfigError", "007.tar", "CRC-32", "bytes")
    store.rm_file(f"{store_address}/007.tar")
    assert_refused(node.epoch(), "ConfigError", "007.tar", "no such object")
