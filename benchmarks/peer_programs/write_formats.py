"""Write the samples of the tar shards, or of the Parquet files, in the format of a peer.

    write_formats.py FORMAT FOLDER

FORMAT: arrow, litdata, mosaic, or mosaic-hashed. A chunk has as many samples as a shard. Prints {},
or {"error": ...}.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def stored(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard, with the label as a number."""
    with tarfile.open(path) as archive:
        data = b""
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            if member.name.endswith(".bin"):
                data = file.read()
            else:
                yield {"bin": data, "cls": int(file.read())}


def write_arrow(folder: Path, shards: list[str]) -> None:
    from datasets import Dataset

    rows = sorted(map(str, folder.glob("rows/*.parquet")))
    made = Dataset.from_parquet(rows, cache_dir=str(folder / "cache"))
    made.save_to_disk(str(folder / "arrow"))


def write_litdata(folder: Path, shards: list[str]) -> None:
    from litdata import optimize

    size = sum(1 for _ in stored(shards[0]))
    optimize(stored, shards, str(folder / "litdata"), chunk_size=size, num_workers=1, verbose=False)


def write_mosaic(folder: Path, shards: list[str]) -> None:
    from streaming import MDSWriter

    columns, size = {"bin": "bytes", "cls": "int"}, Path(shards[0]).stat().st_size
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=size) as writer:
        for shard in shards:
            for sample in stored(shard):
                writer.write(sample)


def write_mosaic_hashed(folder: Path, shards: list[str]) -> None:
    """With a hash of each shard, which a reader may check, and exactly the samples of a tar shard in each."""
    from streaming import MDSWriter

    columns = {"bin": "bytes", "cls": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, hashes=["xxh64"], size_limit=None) as writer:
        sizes = [len(writer.encode_sample(sample)) for sample in stored(shards[0])]
        writer.size_limit = writer.new_shard_size + sum(sizes) + len(sizes) * writer.extra_bytes_per_sample
        for shard in shards:
            for sample in stored(shard):
                writer.write(sample)


WRITERS = {
    "arrow": write_arrow,
    "litdata": write_litdata,
    "mosaic": write_mosaic,
    "mosaic-hashed": write_mosaic_hashed,
}


def main(form: str, folder: str) -> None:
    try:
        WRITERS[form](Path(folder), sorted(map(str, Path(folder).glob("tar/*.tar"))))
        found = {}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
