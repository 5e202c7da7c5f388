"""Measure how fast samples stored in blocks are read: tandem, the formats' own readers, other libraries.

    python benchmarks/block_reads.py [--rounds 5] [--samples 61440] [--remote-samples 245760] [--bytes 2048]
        [--only PART ...] [--json FILE]

Without a model, and in one process. On this machine, with a warm page cache, tandem reads an epoch of tar
shards, Parquet files and a dataset of Hugging Face `datasets` in its own shuffled order. The formats' own
readers read the same samples one after another. All yield the same Python values, which is checked.
"Dataset" is `__getitems__` of tandem's dataset in the order of a run; "loader" is all that a run does for a
batch. Times are processor times, which equal wall times on an idle machine. (peer_programs/local_reads.py)

Over http, each reader starts in a process of its own with an empty cache, shuffles as for training, and reads
all samples once (peer_programs/remote_reads.py). An epoch has several times the samples that tandem fetches
ahead. The server waits before each answer, as an object store does. Times are wall times from opening the
data, without imports. A chunk, file or row group of a peer has the samples of one shard, and a shard of
Mosaic Streaming has as many bytes.

In a round all readers have their turn, each round beginning with another one. Ratios are of the same round,
and the result is their median. Peers are installed from PyPI on first use, unless --peers-python names
another interpreter. For one that is not installed or does not read, the row has the reason.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peer_environments import Environment, NotInstalled, prepare, versions
from range_files import served
from table import ROOT, Row, finish

sys.path.append(str(ROOT / "tests"))

from shards import write_shard
from tandem.data.tar_index import index_shards

PROGRAMS = ROOT / "benchmarks" / "peer_programs"
PEERS_PYTHON = ROOT / "build" / "peers-data" / "bin" / "python"
PEERS = Environment(
    (
        "--no-deps webdataset==1.0.2 litdata==0.2.76 datasets==5.2.0 mosaicml-streaming==0.13.0",
        "braceexpand lightning-utilities tifffile obstore dill<0.4.2 pandas xxhash multiprocess<0.70.20 "
        "huggingface-hub<3 filelock tqdm Brotli zstd<2 python-snappy catalogue<3 packaging transformers>=5",
    )
)
"""Streaming asks for an older numpy, which torch's release is not installed with."""
LOCAL = ("tar", "parquet", "arrow")
PARTS = (*LOCAL, "remote")
BATCH = 256
SHARD_SAMPLES = 1024
ROW_GROUP, SCALARS = 100, 16
DELAY = 0.03
WRITTEN = ("arrow", "litdata", "mosaic", "mosaic-hashed")
"""Formats that only their own libraries write."""
LIMIT_SECONDS = 300.0
ATTEMPTS = 2
"""Attempts for a turn over http. litdata once waited in vain for a thread of its own."""


class Pair(NamedTuple):
    """A row about files on this machine: which two readers are compared, and the target ratio."""

    part: str
    name: str
    mine: str
    control: str
    least: float | None = 1.0


PAIRS = (
    Pair("tar", "tar shards: tandem's dataset", "dataset", "tarfile"),
    Pair("tar", "tar shards: tandem's dataset", "dataset", "webdataset"),
    Pair("tar", "tar shards: tandem's loader", "loader", "tarfile"),
    Pair("tar", "tar shards: tandem's loader", "loader", "webdataset"),
    Pair("parquet", "Parquet: tandem's dataset, lists of floats", "dataset", "pyarrow"),
    Pair("parquet", "Parquet: tandem's loader, lists of floats", "loader", "pyarrow"),
    Pair("parquet", "Parquet: tandem's dataset, NumPy arrays", "arrays", "pyarrow", None),
    Pair("arrow", "Arrow: tandem's dataset", "dataset", "datasets"),
    Pair("arrow", "Arrow: tandem's loader", "loader", "datasets"),
)
SEQUENTIAL = {
    "tarfile": "Python's tarfile",
    "webdataset": "webdataset",
    "pyarrow": "pyarrow's iter_batches",
    "datasets": "datasets",
}


REMOTE_TITLE = f"tar shards over http, {DELAY * 1000:.0f} ms before each answer: tandem's loader"


class Peer(NamedTuple):
    """A library that reads over http: its package, the format that it needs, and the target ratio."""

    title: str
    package: str
    form: str = ""
    least: float | None = None


REMOTE = {
    "webdataset": Peer("webdataset, shuffle(1000)", "webdataset", least=3.0),
    "litdata": Peer("litdata, shuffle=True, with a downloader for http", "litdata", "litdata", 1.8),
    "datasets-tar": Peer("datasets, streaming the tar shards, shuffle(1000)", "datasets", least=1.8),
    "datasets-parquet": Peer("datasets, streaming Parquet, shuffle(1000)", "datasets", least=1.8),
    "mosaic": Peer(
        "Mosaic Streaming, shuffle=True, with a downloader for http", "mosaicml-streaming", "mosaic"
    ),
}


def write_tar(folder: Path, samples: int, size: int) -> None:
    """Write shards of samples with `size` random bytes and a label, their names, and their index."""
    draw, names = random.Random(0), list[str]()
    (folder / "tar").mkdir()
    for first in range(0, samples, SHARD_SAMPLES):
        files = []
        for number in range(first, min(first + SHARD_SAMPLES, samples)):
            files.append((f"{number:08}.bin", draw.randbytes(size)))
            files.append((f"{number:08}.cls", str(number % 1000).encode()))
        names.append(f"{first // SHARD_SAMPLES:05}.tar")
        write_shard(folder / "tar" / names[-1], files)
    (folder / "shards.json").write_text(json.dumps(names))
    index_shards([str(folder / "tar" / name) for name in names], folder / "local.jsonl")


def write_parquet_of_tar(folder: Path, samples: int, size: int) -> None:
    """Write the samples of each shard as a Parquet file with one row group."""
    import pyarrow
    from pyarrow import parquet

    draw = random.Random(0)
    (folder / "parquet").mkdir()
    for first in range(0, samples, SHARD_SAMPLES):
        numbers = range(first, min(first + SHARD_SAMPLES, samples))
        images, labels = [draw.randbytes(size) for _ in numbers], [each % 1000 for each in numbers]
        table = pyarrow.table({"bin": images, "cls": labels})
        path = folder / "parquet" / f"{first // SHARD_SAMPLES:05}.parquet"
        parquet.write_table(table, path, row_group_size=SHARD_SAMPLES, compression="none")


def write_rows(folder: Path, samples: int) -> None:
    """Write Parquet files with a label and a list of SCALARS floats."""
    import numpy
    import pyarrow
    from pyarrow import parquet

    (folder / "rows").mkdir()
    values = numpy.random.default_rng(0).standard_normal((samples, SCALARS), dtype=numpy.float32)
    size = 10 * SHARD_SAMPLES
    for first in range(0, samples, size):
        part = values[first : first + size]
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), SCALARS)
        labels = pyarrow.array(numpy.arange(first, first + len(part)) % 1000, pyarrow.int64())
        table = pyarrow.table({"label": labels, "values": lists})
        parquet.write_table(table, folder / "rows" / f"{first // size:05}.parquet", row_group_size=ROW_GROUP)


def variables(own: Path | None) -> dict[str, str]:
    """Return the environment of a program of peer_programs.

    `own`: the folder for what libraries keep of what they have read.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "HF_"))}
    more = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    more |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if own:
        more |= {"HF_HOME": str(own / "hf"), "TMPDIR": str(own)}
    return kept | more


def answer(python: str, program: str, *words: object, own: Path | None = None) -> dict[str, Any]:
    """Return what a program of peer_programs prints as JSON, or {"error"} if it prints none."""
    command = [python, str(PROGRAMS / program), *map(str, words)]
    try:
        done = subprocess.run(
            command, env=variables(own), capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except FileNotFoundError:
        return {"error": "not installed: there is no such interpreter"}
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {LIMIT_SECONDS:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"ended with {done.returncode}: {last}"}
    return dict(json.loads(lines[-1]))


def measure_local(folder: Path, python: str, part: str, rounds: int, samples: int) -> list[Row]:
    """Return the rows of one format on this machine."""
    found = written(folder, python, part) or answer(python, "local_reads.py", part, folder, rounds)
    pairs = [pair for pair in PAIRS if pair.part == part]
    if "error" in found:
        return [not_read(pair.name, SEQUENTIAL[pair.control], found["error"]) for pair in pairs]
    for name, of in found.items():
        print(f"{part}: {name} {of.get('error') or of['seconds']}", file=sys.stderr, flush=True)
    return [local_row(pair, found[pair.mine], found[pair.control], samples) for pair in pairs]


def written(folder: Path, python: str, form: str) -> dict[str, Any]:
    """Write the samples in the format of a peer, if it has one; return {"error"} if that fails, else {}."""
    return answer(python, "write_formats.py", form, folder, own=folder) if form in WRITTEN else {}


def local_row(pair: Pair, mine: dict[str, Any], control: dict[str, Any], samples: int) -> Row:
    about = SEQUENTIAL[pair.control]
    for side in (mine, control):
        if "error" in side:
            return not_read(pair.name, about, side["error"])
    if any(mine[what] != control[what] for what in ("samples", "checksum", "first")):
        return not_read(pair.name, about, "reads other samples than tandem", False)
    each, other = ([seconds / samples for seconds in side["seconds"]] for side in (mine, control))
    return row(pair.name, each, f"{about} {microseconds(other)}", other, microseconds(each), pair.least)


def measure_remote(folder: Path, python: str, rounds: int, samples: int, missing: str) -> list[Row]:
    """Return the rows about reads over http; `missing`: why there are no peers."""
    names = ["tandem", *REMOTE]
    errors = {}
    for name, peer in REMOTE.items():
        if error := missing or written(folder, python, peer.form).get("error"):
            errors[name] = error
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with served(folder, DELAY) as address:
        write_remote_index(folder, address)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if name in errors:
                    continue
                program = sys.executable if name == "tandem" else python
                for attempt in range(ATTEMPTS):
                    cache = folder.parent / f"{name}-{number}-{attempt}"
                    found = read_remotely(name, program, address, samples, cache)
                    if "error" not in found:
                        break
                    print(f"round {number + 1}: {name} {found}", file=sys.stderr, flush=True)
                print(f"round {number + 1}: {name} {found}", file=sys.stderr, flush=True)
                turns[name].append(found)
                if "error" in found:
                    errors[name] = found["error"]
    if "tandem" in errors:
        return [not_read(REMOTE_TITLE, "tandem", errors["tandem"], False)]
    return [remote_row(name, python, turns, errors.get(name, ""), samples) for name in REMOTE]


def read_remotely(name: str, python: str, address: str, samples: int, cache: Path) -> dict[str, Any]:
    """Read everything once with an empty cache below `cache`, which stays there.

    ext4 is slow to create files where others have just been removed, so all caches stay until all readers are
    done. They take 2 GB for each round of 245,760 samples of 2 KB.
    """
    own, empty = cache / "own", cache / "cache"
    own.mkdir(parents=True)
    empty.mkdir()
    found = answer(python, "remote_reads.py", name, address, empty, own=own)
    if "error" not in found and found["samples"] != samples:
        return {"error": f"read {found['samples']:,} of {samples:,} samples"}
    return found


def write_remote_index(folder: Path, address: str) -> None:
    """Write the index of the shards with their addresses on the server."""
    lines = []
    for line in (folder / "local.jsonl").read_text().splitlines():
        block = json.loads(line)
        lines.append(json.dumps({**block, "address": f"{address}/{block['address']}"}))
    (folder / "remote.jsonl").write_text("\n".join(lines) + "\n")


def remote_row(
    name: str, python: str, turns: dict[str, list[dict[str, Any]]], error: str, samples: int
) -> Row:
    peer = REMOTE[name]
    if error:
        return not_read(REMOTE_TITLE, peer.title, error)
    if len({turn["checksum"] for turn in (*turns["tandem"], *turns[name])}) > 1:
        return not_read(REMOTE_TITLE, peer.title, "reads other samples than tandem", False)
    release = versions(python, (peer.package,))[peer.package]
    mine, other = ([turn["seconds"] / samples for turn in turns[each]] for each in ("tandem", name))
    told = f"{per_second(mine)}, {first(turns['tandem'])}"
    theirs = f"{per_second(other)}, {first(turns[name])}"
    about = peer.title.replace(",", f" {release},", 1)
    return row(REMOTE_TITLE, mine, f"{about}: {theirs}", other, told, peer.least)


def first(turns: Sequence[dict[str, Any]]) -> str:
    """Return when the first sample was there."""
    return f"the first after {statistics.median(turn['first'] for turn in turns):.2f} s"


def row(
    name: str, mine: list[float], control: str, other: list[float], outcome: str, least: float | None
) -> Row:
    """Return the row of a measured pair: seconds of a sample in each round, on both sides."""
    ratio = statistics.median(theirs / ours for ours, theirs in zip(mine, other, strict=True))
    return Row(
        name,
        len(mine),
        outcome,
        control,
        f"{ratio:.2f} times",
        "" if least is None else f"at least {least:g} times",
        None if least is None else ratio >= least,
        len(other),
        statistics.median(mine),
        statistics.median(other),
    )


def not_read(name: str, about: str, error: str, passed: bool | None = None) -> Row:
    """Return the row of a pair of which one side does not work here."""
    return Row(name, 0, "not compared", f"{about}: {error[:200]}", passed=passed)


def microseconds(seconds: Sequence[float]) -> str:
    middle, lowest, highest = statistics.median(seconds) * 1e6, min(seconds) * 1e6, max(seconds) * 1e6
    return f"{middle:.1f} µs a sample ({lowest:.1f} to {highest:.1f})"


def per_second(seconds: Sequence[float]) -> str:
    rates = [1 / each for each in seconds]
    return f"{statistics.median(rates):,.0f}/s ({min(rates):,.0f} to {max(rates):,.0f})"


def interpreter(asked: Path) -> tuple[str, str]:
    """Return the interpreter with the peers, or this one and why there are none."""
    if asked != PEERS_PYTHON:
        return (str(asked), "") if asked.exists() else (sys.executable, f"not installed: no {asked.name}")
    try:
        return prepare("peers-data", PEERS, ROOT / "build"), ""
    except NotInstalled as error:
        print(f"peers: {error}", file=sys.stderr, flush=True)
        return sys.executable, f"not installed: {error}"


def measure(asked: argparse.Namespace) -> list[Row]:
    python, missing = interpreter(asked.peers_python)
    # No batch is left incomplete.
    samples, remote = (max(1, each // BATCH) * BATCH for each in (asked.samples, asked.remote_samples))
    with tempfile.TemporaryDirectory(prefix="block-reads-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if "tar" in asked.only:
            write_tar(folder, samples, asked.bytes)
        if {"parquet", "arrow"} & set(asked.only):
            write_rows(folder, samples)
        rows = []
        for part in (each for each in LOCAL if each in asked.only):
            rows += measure_local(folder, python, part, asked.rounds, samples)
        if "remote" in asked.only:
            (far := folder / "remote").mkdir()
            write_tar(far, remote, asked.bytes)
            write_parquet_of_tar(far, remote, asked.bytes)
            rows += measure_remote(far, python, asked.rounds, remote, missing)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=60 * SHARD_SAMPLES, help="on this machine [61440]")
    parser.add_argument("--remote-samples", type=int, default=240 * SHARD_SAMPLES, help="over http [245760]")
    parser.add_argument("--bytes", type=int, default=2048, help="of a sample in the tar shards [2048]")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(measure(asked), asked.json)


if __name__ == "__main__":
    sys.exit(main())
