"""Read samples on this machine by tandem and by the readers of their format, in turn, in this process.

    local_reads.py FORMAT FOLDER ROUNDS

FORMAT: tar, parquet or arrow. Each reader first reads everything once, which fills the page cache, and its
samples are compared with those of the others. Then it has one turn in each round. A turn opens the data and
reads all samples. Prints a line of JSON: {reader: {"seconds": [processor seconds of each turn], "samples",
"checksum", "first": hashes of a few samples}}, or {reader: {"error"}} for one that does not work here.
"""

import hashlib
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.config.slices import DataConfig
from tandem.data import arrow, parquet, tar_blocks
from tandem.data.kinds import training_data
from tandem.data.source import BatchReader

BATCH = 256
FEW = 3
Read = Callable[[Path], Iterator[Any]]


def reader() -> BatchReader:
    """Return what a run of one rank reads with; a batch is the list of its samples."""
    return BatchReader(DataConfig(batch_size=BATCH), 0, 0, 1, list, torch.device("cpu"))


def by_dataset(open_data: Callable[[Path], Any], folder: Path) -> Iterator[Any]:
    """Yield an epoch of the dataset alone, in the order of a run."""
    data = open_data(folder)
    order = training_data(data, reader(), None).order
    for step in range(order.steps_per_epoch):
        yield from data.__getitems__(order.batch(step)[1])


def by_loader(open_data: Callable[[Path], Any], folder: Path) -> Iterator[Any]:
    """Yield an epoch as a run reads it."""
    training = training_data(open_data(folder), reader(), None)
    for micro_batches in training.steps(0, training.order.steps_per_epoch):
        for samples in micro_batches:
            yield from samples


def as_lists(read: Read, folder: Path) -> Iterator[Any]:
    """Yield samples with lists of Python floats, which are NumPy arrays in tandem."""
    for sample in read(folder):
        sample["values"] = sample["values"].tolist()
        yield sample


def by_tarfile(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of the shards, one after another."""
    for path in sorted(folder.glob("tar/*.tar")):
        with tarfile.open(path) as archive:
            sample: dict[str, Any] = {}
            for member in archive:
                key, _, extension = member.name.partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                file = archive.extractfile(member)
                assert file is not None
                sample["__key__"] = key
                sample[extension] = file.read()
            yield sample


def by_webdataset(folder: Path) -> Iterator[dict[str, Any]]:
    import webdataset

    shards = [str(path) for path in sorted(folder.glob("tar/*.tar"))]
    return iter(webdataset.WebDataset(shards, shardshuffle=False))


def by_pyarrow(folder: Path) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    for path in sorted(folder.glob("rows/*.parquet")):
        with ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH, use_threads=False):
                yield from batch.to_pylist()


def by_datasets(folder: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_from_disk

    return iter(load_from_disk(str(folder / "arrow")))


def open_tar(folder: Path) -> Any:
    return tar_blocks(folder / "local.jsonl")


def open_parquet(folder: Path) -> Any:
    return parquet(folder / "rows" / "*.parquet")


def open_arrow(folder: Path) -> Any:
    from datasets import load_from_disk

    return arrow(load_from_disk(str(folder / "arrow")))


READERS: dict[str, dict[str, Read]] = {
    "tar": {
        "dataset": partial(by_dataset, open_tar),
        "loader": partial(by_loader, open_tar),
        "tarfile": by_tarfile,
        "webdataset": by_webdataset,
    },
    "parquet": {
        "dataset": partial(as_lists, partial(by_dataset, open_parquet)),
        "loader": partial(as_lists, partial(by_loader, open_parquet)),
        "arrays": partial(by_dataset, open_parquet),
        "pyarrow": by_pyarrow,
    },
    "arrow": {
        "dataset": partial(by_dataset, open_arrow),
        "loader": partial(by_loader, open_arrow),
        "datasets": by_datasets,
    },
}
FIELDS = {"tar": ("__key__", "bin", "cls"), "parquet": ("label", "values"), "arrow": ("label", "values")}
"""What is compared. webdataset adds the address of the shard."""


def content(sample: dict[str, Any], fields: tuple[str, ...]) -> bytes:
    """Return the Python values of a sample, with their types, as bytes."""
    values = [sample[name] for name in fields]
    return repr([value.tolist() if hasattr(value, "tolist") else value for value in values]).encode()


def checked(read: Read, folder: Path, fields: tuple[str, ...]) -> dict[str, Any]:
    """Read everything once, and return the number of samples and checksums that ignore their order."""
    hashes = [hashlib.md5(content(sample, fields)).hexdigest() for sample in read(folder)]
    total = sum(int(each, 16) for each in hashes) % 2**64
    return {"samples": len(hashes), "checksum": total, "first": sorted(hashes)[:FEW], "seconds": []}


def timed(read: Read, folder: Path) -> float:
    """Return the processor seconds of one turn."""
    began = time.process_time()
    for _ in read(folder):
        pass
    return time.process_time() - began


def main(form: str, folder: str, rounds: str) -> None:
    torch.set_num_threads(1)
    readers, found = READERS[form], {}
    for name, read in readers.items():
        try:
            found[name] = checked(read, Path(folder), FIELDS[form])
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    able = [name for name in readers if "error" not in found[name]]
    for number in range(int(rounds)):
        turn = number % max(1, len(able))
        for name in able[turn:] + able[:turn]:
            found[name]["seconds"].append(timed(readers[name], Path(folder)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
