"""The block cache: right samples or an error that names the block, one request each, never above a limit."""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import patient
from range_server import RangeServer, serving
from shards import write_shard
from tandem.data import block_cache, block_fetcher, ranges, tar_blocks, tar_shards
from tandem.data.block_cache import LOCKS, PART, BlockCache, contents
from tandem.data.block_fetcher import OUTCOMES
from tandem.data.ranges import RangeReader
from tandem.data.tar_index import StoredBlock, index_shards, read_index
from tandem.data.tar_shards import BlockMetrics, TarBlocks
from tandem.errors import ConfigError, DataUnavailableError
from tandem.report.history import block_reads
from tandem.telemetry.metrics import REQUEST_OUTCOMES
from tandem.telemetry.registry import Registry

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
SHARDS = 4
SAMPLES = 120
"""Of a shard, in four blocks."""
BLOCK = 12_000


def payload(shard: int, number: int) -> bytes:
    return random.Random(f"{shard} {number}").randbytes(random.Random(number).choice((300, 700)))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        files = [
            (f"{number:04}.{name}", data)
            for number in range(SAMPLES)
            for name, data in (("bin", payload(shard, number)), ("cls", str(shard).encode()))
        ]
        write_shard(folder / f"{shard}.tar", files)
    index_shards([str(folder / f"{shard}.tar") for shard in range(SHARDS)], folder / "index.jsonl", BLOCK)
    return folder


@pytest.fixture
def server(shards: Path) -> Iterator[RangeServer]:
    with serving(shards) as each:
        yield each


@pytest.fixture
def opened(server: RangeServer, shards: Path, tmp_path: Path) -> Iterator["Opening"]:
    opening = Opening(server, shards, tmp_path)
    yield opening
    for each in opening.made:
        each.close()


class Opening:
    """Datasets over the server, with one cache."""

    def __init__(self, server: RangeServer, shards: Path, folder: Path) -> None:
        self.cache = folder / "cache"
        self.made: list[TarBlocks] = []
        self.index = folder / "index.jsonl"
        local = (shards / "index.jsonl").read_text()
        self.index.write_text(local.replace('"address": "', f'"address": "{server.address}/'))
        self.blocks = read_index(self.index)

    def __call__(self, deadline: float = 20.0, cache_bytes: int | None = 10**9) -> TarBlocks:
        data = tar_blocks(
            self.index, cache_dir=self.cache, cache_bytes=cache_bytes, deadline=deadline
        )
        self.made.append(data)
        return data


def check(data: TarBlocks, indices: list[int] | None = None) -> None:
    """Every sample is the right one."""
    indices = list(range(len(data))) if indices is None else indices
    for index, sample in zip(indices, data.__getitems__(indices), strict=True):
        shard, number = divmod(index, SAMPLES)
        assert sample == {
            "__key__": f"{number:04}", "bin": payload(shard, number), "cls": str(shard).encode()
        }  # fmt: skip


def once(opening: Opening) -> dict[str, int]:
    return {f"{Path(b.address).name} bytes={b.offset}-{b.offset + b.length - 1}": 1 for b in opening.blocks}


def test_local_shards_are_read_in_place(shards: Path, tmp_path: Path) -> None:
    data = tar_blocks(shards / "index.jsonl", cache_dir=tmp_path / "cache")
    indices = random.Random(0).sample(range(len(data)), len(data))
    check(data, indices)
    assert sum(data.block_sizes()) == len(data) == SHARDS * SAMPLES
    data.will_need(range(len(data.blocks)))
    assert data.status() is None and not (tmp_path / "cache").exists()
    assert data[-1]["__key__"] == f"{SAMPLES - 1:04}"
    with pytest.raises(IndexError):
        data[len(data)]
    decoded = tar_blocks(shards / "index.jsonl", decode=lambda sample: int(sample["cls"]))
    assert decoded.__getitems__([0, SAMPLES, 0]) == [0, 1, 0]


def open_files(folder: Path) -> int:
    """How many files of a folder this process has open."""
    names = [entry for entry in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{entry}")]
    return sum(os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/") for name in names)


def test_local_shards_stay_open_up_to_a_limit(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    open_file = tar_shards._open_file
    monkeypatch.setattr(tar_shards, "_open_file", lambda path: counted.append(path) or open_file(path))
    data = tar_blocks(shards / "index.jsonl")
    for _ in range(3):
        check(data, list(range(0, len(data), 7)))
    assert sorted(counted) == sorted({block.address for block in data.blocks})
    assert open_files(shards) == SHARDS
    monkeypatch.setattr(tar_shards, "OPEN_SHARDS", 1)
    monkeypatch.setattr(tar_shards, "getrlimit", lambda kind: (8, 1024))
    few = pickle.loads(pickle.dumps(data))
    del data
    few.hold(300, 1)
    check(few)
    assert open_files(shards) == 2
    del few
    assert open_files(shards) == 0


def test_blocks_in_the_cache_are_closed_after_each_read(opened: Opening) -> None:
    check(opened())
    assert open_files(opened.cache) == 2  # both of LOCKS


def test_a_block_is_in_memory_until_each_of_its_samples_was_read(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.tar").write_bytes((shards / "0.tar").read_bytes())
    index_shards([str(tmp_path / "0.tar")], tmp_path / "index.jsonl", BLOCK)
    data = tar_blocks(tmp_path / "index.jsonl")
    reads: list[int] = []
    read = tar_shards._sample_of_file
    monkeypatch.setattr(tar_shards, "_sample_of_file", lambda *given: reads.append(given[-1]) or read(*given))
    of_block = range(data.block_sizes()[0])
    for sample in random.Random(0).sample(of_block, len(of_block)):
        check(data, [sample])
    assert not reads and not data._in_memory._blocks
    check(data, [3])
    assert reads == [3]
    # One of two processes has half of the memory: here two of the four blocks.
    monkeypatch.setattr(tar_shards, "MOST_IN_MEMORY", 4 * max(block.length for block in data.blocks))
    few = pickle.loads(pickle.dumps(data))
    few.hold(4, 2)
    for index in random.Random(1).sample(range(len(few)), len(few)):
        check(few, [index])
        assert sum(len(each.data or b"") for each in few._in_memory._blocks.values()) == few._in_memory._size
        assert few._in_memory._size <= few._in_memory.limit
    assert 1 < len(reads) < len(few)


def test_a_local_shard_that_changed_is_refused(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    raw = bytearray((shards / "0.tar").read_bytes())
    path.write_bytes(raw)
    index_shards([str(path)], tmp_path / "index.jsonl", BLOCK)
    raw[5000] ^= 1
    path.write_bytes(raw)
    data = tar_blocks(tmp_path / "index.jsonl")
    with pytest.raises(ConfigError, match=r"0\.tar.*tandem index"):
        check(data, [0])
    path.unlink()
    with pytest.raises(ConfigError, match=r"0\.tar"):
        check(data, [SAMPLES - 1])


def test_every_block_is_requested_once(opened: Opening, server: RangeServer) -> None:
    data = opened()
    data.will_need(range(len(data.blocks)))
    check(data)
    status = data.status()
    assert status is not None
    assert dict(server.requests) == once(opened)
    assert status.get("ok") == len(data.blocks) and status.get("bytes") == server.sent
    second = opened()
    check(second)
    assert dict(server.requests) == once(opened), "the next run finds them in the cache"
    assert not list(opened.cache.glob("*" + PART))


@pytest.mark.parametrize("fault", ["share_500", "share_resets", "share_flipped"])
def test_a_fifth_of_the_answers_are_bad(
    opened: Opening, server: RangeServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setattr(server.faults, fault, 0.2 if fault != "share_flipped" else 0.05)
    data = opened(deadline=patient(60))
    data.will_need(range(len(data.blocks)))
    check(data)
    assert sum(server.requests.values()) > len(data.blocks)


def test_a_stall_ends_with_another_request(
    opened: Opening, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BLOCK_STALL_SECONDS", 0.3)
    server.faults.stalling = {"1.tar"}
    server.faults.stalls_once = True
    block = next(each for each in opened.blocks if each.address.endswith("1.tar"))
    data = RangeReader(patient(20)).read(block.address, block.offset, block.length)
    assert zlib.crc32(data) == block.crc32


@pytest.mark.parametrize(
    ("fault", "value", "words"),
    [
        ("missing", {"1.tar"}, ("1.tar", "404")),
        ("flipped", {"1.tar"}, ("1.tar", "CRC-32", "3 answers", "bytes")),
        ("no_ranges", True, ("0.tar", "ranges")),
    ],
)
def test_what_no_retry_can_fix_ends_the_run_at_once(
    opened: Opening, server: RangeServer, fault: str, value: object, words: tuple[str, ...]
) -> None:
    setattr(server.faults, fault, value)
    data = opened(deadline=patient(60))
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        check(data)
    assert time.monotonic() - began < patient(20)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        data.will_need([0])


@pytest.mark.parametrize(
    ("fault", "cause"), [("always_500", "500"), ("stalling", "timed out"), ("share_resets", "reset")]
)
def test_a_server_that_stays_away_ends_the_rank_for_a_restart(
    opened: Opening, server: RangeServer, fault: str, cause: str
) -> None:
    setattr(server.faults, fault, 1.0 if fault == "share_resets" else {"0.tar"})
    data = opened(deadline=2.0)
    data.will_need([0])
    with pytest.raises(DataUnavailableError) as caught:
        check(data, [0])
    assert all(word in str(caught.value) for word in ("0.tar", "bytes 0 to", "2 s", cause))
    status = data.status()
    assert status is not None and status.get("failed") == 1


def test_a_shard_that_became_shorter_is_refused(opened: Opening, server: RangeServer, shards: Path) -> None:
    block = opened.blocks[3]._replace(length=10**6)
    with pytest.raises(ConfigError, match="tandem index"):
        RangeReader().read(block.address, block.offset, block.length)
    with pytest.raises(ConfigError, match="tandem index"):
        RangeReader().read(block.address, 10**7, 10)


def test_redirects_are_followed(opened: Opening, server: RangeServer, shards: Path) -> None:
    with serving(shards) as first:
        first.faults.redirect_to = server.address
        block = opened.blocks[0]
        data = RangeReader().read(f"{first.address}/0.tar", block.offset, block.length)
        assert zlib.crc32(data) == block.crc32
        first.faults.redirect_to = first.address
        with pytest.raises(ConfigError, match="redirects"):
            RangeReader().read(f"{first.address}/0.tar", block.offset, block.length)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_thread_reads_all_ranges_over_one_connection_into_one_memory(
    opened: Opening, server: RangeServer, in_chunks: bool
) -> None:
    server.faults.in_chunks = in_chunks
    reader, connections = RangeReader(), set[int]()
    for _ in range(2):
        for block in opened.blocks:
            assert zlib.crc32(reader.read(block.address, block.offset, block.length)) == block.crc32
            connections |= {id(each) for each in reader._local.open.values()}
    assert len(connections) == 1
    kept = reader.read(opened.blocks[0].address, 0, 512)
    before = bytes(kept)
    reader.read(opened.blocks[0].address, 512, 512)
    assert bytes(kept) != before, "the docstring says so"


def test_a_fetching_process_that_was_killed_ends_the_rank(opened: Opening, server: RangeServer) -> None:
    data = opened()
    check(data, [0])
    fetcher = data._started()
    os.kill(fetcher.pid, signal.SIGKILL)
    with pytest.raises(DataUnavailableError, match="process"):
        check(data, [len(data) - 1])
    check(pickle.loads(pickle.dumps(data)), [0])


def test_it_ends_with_its_rank(opened: Opening) -> None:
    code = (
        "import time\nfrom pathlib import Path\nfrom tandem.data.block_cache import BlockCache\n"
        "from tandem.data.block_fetcher import BlockFetcher\n"
        f"fetcher = BlockFetcher(BlockCache(Path({str(opened.cache)!r}), 10**9), 20)\n"
        "print(fetcher.pid, flush=True)\ntime.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert rank.stdout is not None
    with rank, rank.stdout:
        pid = int(rank.stdout.readline())
        until = time.monotonic() + patient(20)
        while b"tandem-blocks" not in Path(f"/proc/{pid}/comm").read_bytes() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)  # a scheduler signals the whole tree, and the rank needs blocks to save
        time.sleep(0.2)
        assert Path(f"/proc/{pid}").exists()
        rank.kill()
    until = time.monotonic() + patient(10)
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_metrics_count_what_the_server_counts(opened: Opening, server: RangeServer) -> None:
    node = Registry()
    value = node.registry.get_sample_value
    server.faults.share_500 = 0.2
    server.faults.share_resets = 0.1
    server.faults.share_flipped = 0.05
    assert REQUEST_OUTCOMES == OUTCOMES
    report = BlockMetrics(3)
    assert report() == []
    assert block_reads(node) == []
    data = opened(deadline=patient(60))
    data.will_need(range(len(data.blocks)))
    check(data)
    node.apply(report())
    count = len(data.blocks)
    answers = server.answers
    for outcome, expected in (
        ("ok", count), ("damaged", answers["flipped"]), ("retried", answers["500"] + answers["reset"]),
        ("failed", 0),
    ):  # fmt: skip
        assert value("tandem_block_requests_total", dict(outcome=outcome, node="0")) == expected, outcome
    assert answers["whole"] == count and answers["500"] + answers["reset"] > 0
    assert sum(server.requests.values()) == sum(answers.values())
    assert value("tandem_block_bytes_total", dict(node="0")) == server.sent
    needed = sum(len(payload(*divmod(index, SAMPLES))) + 1 for index in range(len(data)))
    assert value("tandem_block_needed_bytes_total", dict(node="0")) == needed
    assert value("tandem_block_wait_seconds_total", dict(node="0")) > 0
    assert value("tandem_blocks_ahead", dict(rank="3", node="0")) == count
    assert value("tandem_block_cache_bytes", dict(node="0")) == BlockCache(opened.cache, 10**9).used()
    assert value("tandem_block_cache_limit_bytes", dict(node="0")) == 10**9
    (row,) = block_reads(node)
    assert row["bytes"] == server.sent and row["needed_bytes"] == needed and row["node"] == 0
    assert row["damaged"] == answers["flipped"] and row["ahead"] == row["ok"] == count
    again = opened()
    again.will_need(range(count))
    check(again)
    status = again.status()
    until = time.monotonic() + patient(20)
    while status is not None and status.get("hits") < count and time.monotonic() < until:
        time.sleep(0.01)  # the process may have just begun
    node.apply(report())
    node.apply(report())
    assert value("tandem_block_requests_total", dict(outcome="ok", node="0")) == count
    assert value("tandem_block_cache_hits_total", dict(node="0")) == count
    assert value("tandem_block_bytes_total", dict(node="0")) == server.sent, "no request was needed"
    assert value("tandem_block_needed_bytes_total", dict(node="0")) == 2 * needed


def test_a_request_that_fails_for_good_is_counted(opened: Opening, server: RangeServer) -> None:
    node = Registry()
    server.faults.missing = {"1.tar"}
    data = opened()
    with pytest.raises(ConfigError):
        check(data)
    node.apply(BlockMetrics(0)())
    value = node.registry.get_sample_value
    assert value("tandem_block_requests_total", dict(outcome="failed", node="0")) == server.answers["404"] > 0


# The folder.


def made(folder: Path, number: int, length: int = 4096) -> StoredBlock:
    return StoredBlock("http://host/a.tar", number, length, 1, 0)


def put(cache: BlockCache, block: StoredBlock, urgent: bool = False) -> bool:
    with cache.writing(block):
        part = cache.reserve(block, urgent)
        if part is None:
            return False
        cache.commit(part, block)
        return True


def there(cache: BlockCache) -> int:
    files = [path for path in cache.folder.iterdir() if path.name != LOCKS]
    return sum(path.stat().st_size for path in files)


def test_the_least_recently_used_goes_first_but_not_what_is_read_next(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 4 * 4096)
    other = BlockCache(tmp_path, 4 * 4096)
    blocks = [made(tmp_path, number) for number in range(8)]
    for number, block in enumerate(blocks[:4]):
        assert put(cache, block)
        os.utime(cache.path(block), (number, number))
    other.keep(blocks[0])
    os.utime(cache.path(blocks[0]), (0, 0))
    assert put(cache, blocks[4]) and put(cache, blocks[5])
    assert [block for block in blocks if cache.path(block).exists()] == [blocks[0], *blocks[3:6]]
    for block in blocks[3:6]:
        cache.keep(block)
    assert not put(cache, blocks[6]), "all are read next"
    assert put(cache, blocks[6], urgent=True), "but a rank waits for this one"
    assert there(cache) == cache.used() == 4 * 4096
    cache.release(blocks[5])
    assert put(other, blocks[7])
    assert not cache.path(blocks[5]).exists()


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10 * 4096)
    left, busy = made(tmp_path, 0), made(tmp_path, 1)
    for block in (left, busy):
        assert cache.reserve(block, urgent=False) is not None
    with cache.writing(busy):
        again = BlockCache(tmp_path, 10 * 4096)
        assert [path.name for path in tmp_path.glob("*" + PART)] == [f"{cache.path(busy).name}{PART}"]
        assert again.used() == there(again) == 4096
    (tmp_path / LOCKS).write_bytes(b"no number")
    assert put(again, left) and again.used() == there(again) == 4096, "counted again, without what was left"


def test_a_smaller_limit_shrinks_the_cache(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 100 * 4096)
    for number in range(20):
        assert put(cache, made(tmp_path, number))
    assert there(BlockCache(tmp_path, 5 * 4096)) <= 5 * 4096


def test_a_look_at_a_cache_changes_nothing(tmp_path: Path) -> None:
    assert contents(tmp_path) == (0, 0, None) and not list(tmp_path.iterdir())
    cache = BlockCache(tmp_path, 20 * 4096)
    for number in range(3):
        assert put(cache, made(tmp_path, number, length=5000))
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert contents(tmp_path) == (3, 6 * 4096, 20 * 4096)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    BlockCache(tmp_path, 4 * 4096)
    assert contents(tmp_path).limit == 4 * 4096 and contents(tmp_path).size <= 4 * 4096


def no_permission(path: Path) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_cache_that_cannot_hold_the_blocks_is_refused(
    opened: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(block.length for block in opened.blocks)
    with pytest.raises(ConfigError, match="cache_bytes"):
        opened(cache_bytes=2 * largest - 1)
    with pytest.raises(ConfigError, match="deadline"):
        opened(deadline=0)
    with pytest.raises(ConfigError, match="cache_bytes"):
        opened(cache_bytes=4 * largest).hold(8, 1)
    opened(cache_bytes=8 * largest).hold(8, 1)
    monkeypatch.setattr(block_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * largest))
    with pytest.raises(ConfigError, match="three quarters .* twice the largest block; use another cache_dir"):
        opened(cache_bytes=None)
    monkeypatch.setattr(block_cache.shutil, "disk_usage", no_permission)
    assert opened(cache_bytes=None).cache_bytes == tar_shards.CACHE_BYTES
    (tmp_path / "file").write_text("")
    data = opened()
    data.cache_dir = tmp_path / "file"
    with pytest.raises(ConfigError, match="cache_dir"):
        check(data, [0])


def test_a_damaged_file_of_the_cache_is_removed(opened: Opening, server: RangeServer) -> None:
    data = opened()
    check(data)
    cache = BlockCache(opened.cache, 10**9)
    cache.path(opened.blocks[0]).write_bytes(b"x" * opened.blocks[0].length)
    with pytest.raises(ConfigError, match="damaged"):
        check(opened(), [0])
    check(opened(), [0])


# Several processes.

READER = """
import random, sys, zlib
from pathlib import Path
from tandem.data.block_cache import BlockCache
from tandem.data.block_fetcher import BlockFetcher
from tandem.data.tar_index import read_index
index, folder, limit, seed = sys.argv[1:]
blocks = read_index(Path(index))
fetcher = BlockFetcher(BlockCache(Path(folder), int(limit)), 60)
order = random.Random(int(seed)).sample(range(len(blocks)), len(blocks))
for place, number in enumerate(order):
    fetcher.read_next(tuple(order[place:place + 3]), blocks)
    while True:
        try:
            raw = fetcher.wait_for(blocks[number]).read_bytes()
            break
        except FileNotFoundError:
            pass
    assert zlib.crc32(raw) == blocks[number].crc32
fetcher.close()
print("done", flush=True)
"""


def start(opening: Opening, limit: int, seed: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", READER, str(opening.index), str(opening.cache), str(limit), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def test_three_processes_of_a_node_request_each_block_once(opened: Opening, server: RangeServer) -> None:
    server.faults.delay = 0.02
    readers = [start(opened, 10**9, seed) for seed in range(3)]
    assert [reader.communicate(timeout=patient(60))[0] for reader in readers] == ["done\n"] * 3
    assert dict(server.requests) == once(opened)


def test_the_limit_is_never_exceeded(opened: Opening, server: RangeServer) -> None:
    limit = 6 * 4096 * -(-max(block.length for block in opened.blocks) // 4096)
    readers = [start(opened, limit, seed) for seed in range(2)]
    most = 0
    while any(reader.poll() is None for reader in readers):
        sizes = 0
        for path in opened.cache.iterdir() if opened.cache.exists() else ():
            try:
                sizes += path.stat().st_blocks * 512 if path.name != LOCKS else 0
            except FileNotFoundError:
                pass
        most = max(most, sizes)
    assert [reader.communicate(timeout=patient(60))[0] for reader in readers] == ["done\n"] * 2
    assert 0 < most <= limit


@pytest.mark.slow
def test_what_is_there_after_a_kill_is_right(opened: Opening, server: RangeServer) -> None:
    """TEST_KILLS: how often; 100 by hand."""
    server.faults.delay = 0.002
    draw = random.Random(0)
    cache = BlockCache(opened.cache, 10**9)
    work = block_fetcher.SharedStatus()
    kills = 0
    for number in range(int(os.environ.get("TEST_KILLS", "20"))):
        fetcher = block_fetcher.BlockFetcher(cache, 20.0)
        shuffled = draw.sample(range(len(opened.blocks)), len(opened.blocks))
        fetcher.read_next(tuple(shuffled), opened.blocks)
        until = time.monotonic() + patient(20)
        while fetcher.status.get("ok") <= number % 5 and time.monotonic() < until:
            time.sleep(draw.uniform(0, 0.002))
        os.kill(fetcher.pid, signal.SIGKILL)
        fetcher.close()
        kills += 1
        for block in opened.blocks:
            path = cache.path(block)
            if path.exists():
                assert zlib.crc32(path.read_bytes()) == block.crc32
                if draw.random() < 0.7:
                    cache.discard(path)
    assert kills and work.get("ok") == 0
    check(opened())
    assert there(BlockCache(opened.cache, 10**9)) <= cache.used()
    assert not list(opened.cache.glob("*" + PART))


def test_the_list_of_blocks_is_sent_in_lines_that_are_not_mixed(tmp_path: Path) -> None:
    blocks = [StoredBlock(f"http://host/{'a' * 300}{number}.tar", 0, 1, 1, 0) for number in range(40)]
    lines = list(block_fetcher._lines("next", blocks))
    assert len(lines) > 1 and max(map(len, lines)) <= block_fetcher.PIPE_BUF
    assert threading.active_count() >= 1
