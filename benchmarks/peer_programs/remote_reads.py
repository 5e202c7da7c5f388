"""Read an epoch of samples over http in this process, shuffled as for training, with nothing cached before.

    remote_reads.py READER ADDRESS CACHE

READER: a key of READERS. CACHE: an empty folder. Prints a line of JSON: the seconds from opening the data to
the last sample, the seconds to the first one, the processor seconds of this process and those it has waited
for, the number of samples, and a checksum of their contents that ignores their order. Imports are not timed.
If reading fails, the line is {"error": ...}.
"""

import json
import os
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 256
BUFFER = 1000
"""Samples in the shuffle buffer of a reader that has one."""
Content = tuple[bytes, int]
"""The bytes and the label of a sample."""
Open = Callable[[str, Path], Iterator[Content]]


def fetched(address: str, path: str, timeout: float | None = None) -> None:
    """Write a whole file: what litdata and Streaming lack for http://. An error has its address."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer, open(part, "wb") as file:
            file.write(answer.read())
    except OSError as error:
        raise OSError(f"{address}: {error}") from error
    os.replace(part, path)


def shards(address: str) -> list[str]:
    """Return the addresses of the tar shards."""
    with urllib.request.urlopen(f"{address}/shards.json") as answer:
        return [f"{address}/tar/{name}" for name in json.load(answer)]


def tandem() -> Open:
    import torch

    from tandem.config.slices import DataConfig
    from tandem.data import tar_blocks
    from tandem.data.kinds import training_data
    from tandem.data.source import BatchReader

    def read(address: str, cache: Path) -> Iterator[Content]:
        fetched(f"{address}/remote.jsonl", str(cache / "index.jsonl"))
        data = tar_blocks(cache / "index.jsonl", cache_dir=cache / "blocks")
        reader = BatchReader(DataConfig(batch_size=BATCH), 0, 0, 1, list, torch.device("cpu"))
        training = training_data(data, reader, None)
        for micro_batches in training.steps(0, training.order.steps_per_epoch):
            for samples in micro_batches:
                yield from ((sample["bin"], int(sample["cls"])) for sample in samples)
        data.close()

    return read


def webdataset() -> Open:
    import webdataset as library

    def read(address: str, cache: Path) -> Iterator[Content]:
        data = library.WebDataset(shards(address), shardshuffle=100).shuffle(BUFFER)
        return ((sample["bin"], int(sample["cls"])) for sample in data)

    return read


def litdata(fetch: Callable[[str, str], None] = fetched) -> Open:
    from litdata import StreamingDataset
    from litdata.streaming.downloader import Downloader, register_downloader
    from litdata.streaming.resolver import Dir

    class Http(Downloader):
        def download_file(self, remote_chunkpath: str, local_chunkpath: str) -> None:
            if not os.path.exists(local_chunkpath):
                fetch(remote_chunkpath, local_chunkpath)

    register_downloader("http://", Http)

    def read(address: str, cache: Path) -> Iterator[Content]:
        data = StreamingDataset(Dir(url=f"{address}/litdata"), cache_dir=str(cache), shuffle=True)
        return ((sample["bin"], sample["cls"]) for sample in data)

    return read


def datasets_tar() -> Open:
    from datasets import load_dataset

    def read(address: str, cache: Path) -> Iterator[Content]:
        data = load_dataset("webdataset", data_files=shards(address), split="train", streaming=True)
        shuffled = data.shuffle(seed=0, buffer_size=BUFFER)
        return ((sample["bin"], int(sample["cls"])) for sample in shuffled)

    return read


def datasets_parquet() -> Open:
    from datasets import load_dataset

    def read(address: str, cache: Path) -> Iterator[Content]:
        files = [each.replace("/tar/", "/parquet/").replace(".tar", ".parquet") for each in shards(address)]
        data = load_dataset("parquet", data_files=files, split="train", streaming=True)
        shuffled = data.shuffle(seed=0, buffer_size=BUFFER)
        return ((sample["bin"], sample["cls"]) for sample in shuffled)

    return read


def mosaic(**more: Any) -> Open:
    from streaming import StreamingDataset
    from streaming.base.storage.download import DOWNLOADER_MAPPINGS, CloudDownloader

    class Http(CloudDownloader):
        @staticmethod
        def _client_identifier() -> str:
            return "http"

        def clean_up(self) -> None:
            """Nothing is kept open."""

        def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
            fetched(remote, local, timeout)

    DOWNLOADER_MAPPINGS["http"] = Http

    def read(address: str, cache: Path) -> Iterator[Content]:
        data = StreamingDataset(
            remote=f"{address}/mds", local=str(cache / "mds"), batch_size=BATCH, shuffle=True, **more
        )
        return ((sample["bin"], sample["cls"]) for sample in data)

    return read


READERS: dict[str, Callable[[], Open]] = {
    "tandem": tandem,
    "webdataset": webdataset,
    "litdata": litdata,
    "datasets-tar": datasets_tar,
    "datasets-parquet": datasets_parquet,
    "mosaic": mosaic,
}


def processor() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measured(name: str, address: str, cache: Path) -> dict[str, Any]:
    """Read everything, and return the times, the number of samples and the checksum."""
    read = READERS[name]()
    began, cpu, checksum, count, first = time.perf_counter(), processor(), 0, 0, 0.0
    for data, label in read(address, cache):
        count += 1
        checksum += zlib.crc32(data, label)
        first = first or time.perf_counter() - began
    found = {"seconds": time.perf_counter() - began, "first": first, "processor": processor() - cpu}
    return {**found, "samples": count, "checksum": checksum % 2**64}


def main(name: str, address: str, cache: str) -> None:
    try:
        found = measured(name, address, Path(cache))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
