"""Runs on tar shards behind a server that fails: the same weights as from a folder, or a reason by name."""

import random
import re
import struct
from collections.abc import Iterator

import pytest
from small_runs import Runs

from program_files import program_text
from range_server import RangeServer, serving
from shards import write_shard
from tandem.data.block_cache import contents
from tandem.data.tar_index import index_shards, read_index

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]

SAMPLE_BYTES = 33
FLAGS = ("--nproc", 2, "--steps", 30, "--log-every", 5)


@pytest.fixture
def server(runs: Runs) -> Iterator[RangeServer]:
    """Four shards of 150 samples in blocks of 20 to 30, also in the folder of the runs."""
    (runs.folder / "small.py").write_text(program_text("block_cache_task"))
    draw = random.Random(0)
    shards = [runs.folder / f"{shard}.tar" for shard in range(4)]
    for shard, path in enumerate(shards):
        files = []
        for number in range(150):
            x = [draw.gauss(0, 1) for _ in range(8)]
            files += [(f"{number}.bin", struct.pack("8f", *x)), (f"{number}.cls", str(shard).encode())]
        write_shard(path, files)
    index_shards(list(map(str, shards)), runs.folder / "index.jsonl", 50_000)
    with serving(runs.folder) as each:
        text = (runs.folder / "index.jsonl").read_text()
        served = text.replace('"address": "', f'"address": "{each.address}/')
        (runs.folder / "served.jsonl").write_text(served)
        yield each


def values(runs: Runs, name: str) -> dict[str, float]:
    """The last page of a run's metrics: series -> value."""
    lines = (runs.folder / name / "metrics.prom").read_text().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_a_run_on_a_bad_server_has_the_weights_of_a_run_on_a_folder(runs: Runs, server: RangeServer) -> None:
    calm = runs.finish("launch", "calm", *FLAGS)
    assert not server.requests and not (runs.folder / "cache").exists()
    server.faults.share_500 = 0.4
    server.faults.delay = 0.01
    served = runs.finish("launch", "served", *FLAGS, "--workers", 1, "--task.index", "served.jsonl")
    assert served["weights_sha256"] == calm["weights_sha256"] and served["restarts"] == 0
    metrics = values(runs, "served")
    blocks = read_index(runs.folder / "served.jsonl")
    requests = 'tandem_block_requests_total{node="0",outcome="%s"}'
    assert metrics[requests % "ok"] == len(blocks) == server.answers["whole"]
    assert metrics[requests % "retried"] == server.answers["500"] > 0
    assert metrics[requests % "failed"] == metrics[requests % "damaged"] == 0
    assert metrics['tandem_block_bytes_total{node="0"}'] == server.sent
    assert 'tandem_blocks_ahead{node="0",rank="1"}' in metrics
    used = contents(runs.folder / "cache")
    assert metrics['tandem_block_cache_bytes{node="0"}'] == used.size > 0
    assert metrics['tandem_block_cache_limit_bytes{node="0"}'] == used.limit
    # Loader processes have read every sample of the epochs that are done, and some that they read ahead.
    needed = metrics['tandem_block_needed_bytes_total{node="0"}'] / SAMPLE_BYTES
    assert needed == int(needed) and needed >= 30 * 24, needed


def test_a_shard_that_is_missing_ends_the_run_in_one_line(runs: Runs, server: RangeServer) -> None:
    server.faults.missing = {"2.tar"}
    flags = (*FLAGS, "--workers", 1, "--task.index", "served.jsonl")
    code, output = runs.processes.wait(runs.start("launch", "run", *flags))
    assert code == 2 and "Traceback" not in output, output
    assert re.search(r"2\.tar.*404", output), output


def test_a_server_that_stays_away_is_named_and_its_rank_restarted(runs: Runs, server: RangeServer) -> None:
    server.faults.always_500 = {"2.tar"}
    flags = (*FLAGS, "--max-restarts", 1, "--task.index", "served.jsonl", "--task.deadline", 1)
    code, output = runs.processes.wait(runs.start("launch", "run", *flags))
    assert code == 200 and "Traceback" not in output, output
    assert re.search(r"2\.tar, bytes \d+ to \d+.*500", output) and "restarting all ranks" in output, output
