"""200 small tar shards, and a node whose three ranks read an epoch of them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forked import Forked
from patience import patient
from program_files import PROGRAMS
from programs.shard_trial_reader import payload
from shards import write_shard
from tandem.data.block_cache import LOCKS
from tandem.data.tar_index import index_shards, read_index

SHARDS = 200
SAMPLES = 12
"""Of a shard."""
BATCH = 48
AMPLE_BYTES = 10**9
"""A cache that is never full."""
RANKS = 3


def write_shards(folder: Path) -> None:
    """000.tar to 199.tar, and index.jsonl with two blocks of each."""
    for shard in range(SHARDS):
        numbers = range(shard * SAMPLES, (shard + 1) * SAMPLES)
        write_shard(folder / f"{shard:03}.tar", [(f"{number:05}.bin", payload(number)) for number in numbers])
    names = sorted(str(path) for path in folder.glob("*.tar"))
    index_shards(names, folder / "index.jsonl", 14_000)


class Node:
    """The cache and the index of a node, whose ranks read the shards of a folder from `address`."""

    def __init__(self, address: str, shards: Path, folder: Path) -> None:
        self.index = folder / "index.jsonl"
        self.cache = folder / "cache"
        local = (shards / "index.jsonl").read_text()
        self.index.write_text(local.replace('"address": "', f'"address": "{address}/'))
        self.blocks = read_index(self.index)
        self.most_bytes = 0

    def epoch(self, cache_bytes: int = AMPLE_BYTES, deadline: float = 120) -> list[dict[str, Any]]:
        """What each rank has read, and why it ended; the size of the cache is sampled meanwhile."""
        # They are forked: what they do takes less time than an import of torch.
        process = subprocess.Popen if os.environ.get("TEST_FORKS") == "0" else Forked
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        is_small = cache_bytes < AMPLE_BYTES
        given = map(str, (self.index, self.cache, cache_bytes, patient(deadline)))
        command = [sys.executable, str(PROGRAMS / "shard_trial_reader.py"), *given]
        ranks = [
            process([*command, str(rank), str(RANKS), str(BATCH)], stdout=subprocess.PIPE,
                    text=True, env=environment)
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            while any(rank.poll() is None for rank in ranks):
                self.most_bytes = max(self.most_bytes, self._size())
                time.sleep(0.001 if is_small else 0.05)
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


def assert_right(ranks: list[dict[str, Any]]) -> None:
    """Every sample of the epoch came once, and as it was written."""
    assert [(rank["error"], rank["wrong"]) for rank in ranks] == [([], 0)] * RANKS
    numbers = [number for rank in ranks for number in rank["numbers"]]
    assert sorted(numbers) == list(range(SHARDS * SAMPLES))


def assert_refused(ranks: list[dict[str, Any]], kind: str, *words: str) -> None:
    """What was read is right; each rank that needed the bad shard names the fault in these words."""
    assert not any(rank["wrong"] for rank in ranks)
    errors = [rank["error"] for rank in ranks if rank["error"]]
    assert errors and all(error[0] == kind for error in errors), ranks
    assert all(word in error[1] for error in errors for word in words), errors
    # A rank that needs nothing from that shard reads all of its part.
    whole = [len(rank["numbers"]) for rank in ranks if not rank["error"]]
    assert whole == [SHARDS * SAMPLES // RANKS] * len(whole)
