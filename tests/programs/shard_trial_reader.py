"""A rank of a node without a process group: reads an epoch of an index's samples in the order of tandem.

    shard_trial_reader.py INDEX CACHE CACHE_BYTES DEADLINE RANK WORLD_SIZE BATCH_SIZE

CACHE_BYTES 0 is the default limit. Each sample is checked against its key. Prints JSON: "numbers" of all
samples, how many were "wrong", and the "error" as [type, text].
"""

import json
import random
import sys

import torch

from tandem.config.slices import DataConfig
from tandem.data import tar_blocks
from tandem.data.kinds import training_data
from tandem.data.source import BatchReader


def payload(number):
    return random.Random(number).randbytes(1500)


def checked(sample):
    number = int(sample["__key__"])
    return number, sample["bin"] == payload(number)


def main(index, cache, cache_bytes, deadline, rank, world_size, batch_size):
    limit = int(cache_bytes) or None
    data = tar_blocks(index, checked, cache_dir=cache, cache_bytes=limit, deadline=float(deadline))
    config = DataConfig(batch_size=int(batch_size))
    reader = BatchReader(config, 3, int(rank), int(world_size), None, torch.device("cpu"))
    numbers = []
    wrong = 0
    error = []
    try:
        for micro_batches in training_data(data, reader, None).steps(0, len(data) // int(batch_size)):
            for read, right in micro_batches:
                numbers += read.tolist()
                wrong += int((~right).sum())
    except Exception as raised:
        error = [type(raised).__name__, str(raised)]
    data.close()
    print(json.dumps({"numbers": numbers, "wrong": wrong, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
