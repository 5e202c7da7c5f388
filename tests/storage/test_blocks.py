"""Blocks of tar shards from object stores: right samples, or an error that names the object."""

import random
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from servers import ObjectServer

from patience import patient
from shards import write_shard
from tandem.data import tar_blocks
from tandem.data.tar_index import index_shards
from tandem.data.tar_shards import TarBlocks
from tandem.errors import ConfigError, DataUnavailableError

SAMPLES = 60


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(2000)


@pytest.fixture
def address(store_address: str, tmp_path: Path) -> str:
    """A shard in the store, and its index at index.jsonl."""
    write_shard(tmp_path / "a.tar", [(f"{number:03}.bin", payload(number)) for number in range(SAMPLES)])
    address = f"{store_address}/a.tar"
    fsspec.filesystem("s3", skip_instance_cache=True).put_file(str(tmp_path / "a.tar"), address)
    index_shards([address], tmp_path / "index.jsonl", 20_000)
    return address


@pytest.fixture
def data(address: str, tmp_path: Path) -> Iterator[TarBlocks]:
    made = tar_blocks(tmp_path / "index.jsonl", cache_dir=tmp_path / "cache", deadline=patient(5))
    yield made
    made.close()


def test_samples_are_right_although_every_fifth_request_fails(server: ObjectServer, data: TarBlocks) -> None:
    server.damage("500", every=5)
    data.will_need(range(len(data.blocks)))
    found = data.__getitems__(range(SAMPLES))
    assert [sample["bin"] for sample in found] == [payload(number) for number in range(SAMPLES)]
    assert len(data.blocks) > 3


def test_a_store_that_stays_away_and_an_object_that_is_gone(
    server: ObjectServer, data: TarBlocks, address: str, tmp_path: Path
) -> None:
    server.damage("500", every=1)
    impatient = tar_blocks(tmp_path / "index.jsonl", cache_dir=tmp_path / "impatient", deadline=3)
    with pytest.raises(DataUnavailableError, match=r"a\.tar, bytes 0 to"):
        impatient[0]
    impatient.close()
    server.calm()
    fsspec.filesystem("s3", skip_instance_cache=True).rm_file(address)
    with pytest.raises(ConfigError, match=r"a\.tar.*no such object"):
        data[0]
