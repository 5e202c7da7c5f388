"""The index of tar shards: every sample in one block, whatever wrote the archive; a wrong one is one line."""

import json
import random
import tarfile
import zlib
from pathlib import Path

import pytest

from range_server import serving
from shards import write_shard
from tandem import cli
from tandem.data import tar_index
from tandem.data.tar_index import StoredBlock, index_shards, read_index, samples_of
from tandem.errors import ConfigError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def files_of(samples: int, prefix: str = "", seed: int = 0) -> list[tuple[str, bytes]]:
    draw = random.Random(seed)
    return [
        (f"{prefix}{number:05}.{extension}", draw.randbytes(draw.choice((0, 1, 511, 512, 2000))))
        for number in range(samples)
        for extension in ("bin", "seg.txt")
    ]


def read(blocks: list[StoredBlock]) -> list[tuple[str, bytes]]:
    found = []
    for block in blocks:
        raw = Path(block.address).read_bytes()[block.offset : block.offset + block.length]
        assert zlib.crc32(raw) == block.crc32
        table = samples_of(raw)
        assert len(table) == block.samples
        for sample, key in enumerate(table.keys):
            for file in table.files(sample):
                data = raw[table.offsets[file] :][: table.sizes[file]]
                found.append((f"{key}.{table.extensions[file]}", data))
    return found


@pytest.mark.parametrize("prefix", ["", "/", "./folder/", "f" * 90 + "/" + "g" * 40 + "/", "größe/"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_each_sample_is_in_one_block(tmp_path: Path, format: int, prefix: str) -> None:
    files = files_of(250, prefix)
    write_shard(tmp_path / "a.tar", files, format)
    index_shards([str(tmp_path / "a.tar")], tmp_path / "index.jsonl", 50_000)
    blocks = read_index(tmp_path / "index.jsonl")
    assert read(blocks) == files
    assert len(blocks) > 2 and max(block.samples for block in blocks) <= tar_index.BLOCK_SAMPLES
    assert all(block.length < 60_000 for block in blocks)


def test_shards_of_a_server_and_of_a_folder_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_index, "PART", 3000)
    (tmp_path / "served").mkdir()
    (tmp_path / "data/shards").mkdir(parents=True)
    write_shard(tmp_path / "served/a.tar", files_of(20))
    write_shard(tmp_path / "data/shards/b.tar", files_of(20, seed=1))
    with serving(tmp_path / "served") as server:
        address = f"{server.address}/a.tar"
        index_shards([address, str(tmp_path / "data/shards/b.tar")], tmp_path / "data/index.jsonl")
        assert max(server.requests.values()) <= 2, "each byte is read once, but the first, for the size"
    (tmp_path / "data").rename(tmp_path / "moved")
    there, here = read_index(tmp_path / "moved/index.jsonl")
    assert there.address == address
    blocks = [there._replace(address=str(tmp_path / "served/a.tar")), here]
    assert read(blocks) == files_of(20) + files_of(20, seed=1)


def test_wrong_shards_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            index_shards([str(path)], tmp_path / "index.jsonl")
        assert "\n" not in str(caught.value)
        assert all(word in str(caught.value) for word in (str(path), *words))
        assert not (tmp_path / "index.jsonl").exists()

    path = tmp_path / "a.tar"
    refused(path, "No such file")
    path.write_bytes(b"some text" * 1000)
    refused(path, "tar")
    write_shard(path, [])
    refused(path, "no files")
    write_shard(path, [("README", b"")])
    refused(path, "README", "KEY.EXTENSION")
    write_shard(path, [("a.x", b""), ("b.x", b""), ("a.y", b"")])
    refused(path, "'a'", "not next to each other")
    write_shard(path, [("a.x", b""), ("a.x", b"")])
    refused(path, "a.x", "twice")
    write_shard(path, files_of(10))
    path.write_bytes(path.read_bytes()[:9000])
    refused(path, "tar")
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.x"))
    refused(path, "uncompressed")
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.x")
        link.type = tarfile.SYMTYPE
        archive.addfile(link)
    refused(path, "a.x", "regular file")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[1]",
        '{"address": "a", "offset": -1, "length": 1, "count": 1, "crc32": 0}',
        '{"address": "a", "offset": 0, "length": 0, "count": 1, "crc32": 0}',
        '{"address": "a", "offset": 0, "length": 1, "count": "1", "crc32": 0}',
        '{"address": "a", "offset": 0, "length": 1, "count": 1, "crc32"',
    ],
)
def test_a_wrong_line_of_an_index_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "index.jsonl"
    good = json.dumps({"address": "a", "offset": 0, "length": 1, "count": 1, "crc32": 0})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_index(path)


def test_an_index_that_is_cut_off_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    with pytest.raises(ConfigError, match="tandem index"):
        read_index(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no blocks"):
        read_index(path)
    path.write_text(json.dumps({"address": "a", "offset": 0, "length": 1, "count": 1, "crc32": 0}))
    with pytest.raises(ConfigError, match="cut off"):
        read_index(path)


@pytest.mark.parametrize("address", ["ftp://host/a.tar", "http:///a.tar", "https://user:word@host/a.tar"])
def test_an_address_that_cannot_be_read_is_refused_without_its_password(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        index_shards([address], tmp_path / "index.jsonl")
    assert "word@" not in str(caught.value)


def test_the_verb_writes_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "a.tar", files_of(10))
    output = tmp_path / "index.jsonl"
    assert cli.run("index", [str(tmp_path / "a.tar"), "--output", str(output)], {}) == 0
    assert "1 shard, 1 block, 10 samples" in capsys.readouterr().out
    assert json.loads(output.read_text())["address"] == "a.tar"
    with pytest.raises(ConfigError, match="cannot write"):
        cli.run("index", [str(tmp_path / "a.tar"), "--output", str(tmp_path / "none/index.jsonl")], {})
    (stdout := tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    with pytest.raises(ConfigError, match="it is not a regular file"):
        cli.run("index", [str(tmp_path / "a.tar"), "--output", str(stdout)], {})
    with pytest.raises(ConfigError, match="--block-bytes"):
        cli.run("index", [str(tmp_path / "a.tar"), "--block-bytes", "0"], {})


def test_its_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_index, "PROGRESS_SECONDS", 0.0)
    shards = []
    for number in range(3):
        shards.append(str(tmp_path / f"{number}.tar"))
        with tarfile.open(shards[-1], "w") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
    read: list[int] = []
    tar_index.index_shards(shards, tmp_path / "index.jsonl", progress=read.append)
    assert read == [1, 2, 3]
