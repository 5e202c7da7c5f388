"""Read shards from a server with a fault: what do tandem and other libraries return?

    python benchmarks/shard_faults.py [--shards 200] [--limit 500] [--jobs 2] [--only FAULT ...]
        [--peers-python FILE] [--json FILE]

For each fault, each reader reads an epoch of numbered samples over http: 200 shards of 12 samples. Each time
there is a new server, a process of its own and an empty cache. Each sample is compared with what was written.
The peers read the same samples in their own formats, with 12 samples in a chunk, file or MDS shard. All have
their defaults, apart from Mosaic's second entry, which checks the hashes that the writer has stored.
(faulty_files.py, peer_programs/fault_reads.py)

The outcome is "right"; "refused by name" (an error, or what was logged before it, has the name of a bad
shard); "refused" (an error without it); "wrong or lost samples without an error" (the loop ends, and the
process with exit code 0); "wrong samples, then an error"; or "no end" within the limit. Peers are installed
as for block_reads.py. For one that is not installed or does not write its format, the table has the reason.
Seconds are of the whole process.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from block_reads import PEERS_PYTHON, PROGRAMS, interpreter, variables, write_remote_index, written
from peer_environments import versions
from range_files import started
from table import ROOT, Row, finish, save

sys.path.extend([str(ROOT / "tests"), str(PROGRAMS)])

from fault_reads import BATCH, payload

from shards import write_shard
from tandem.data.tar_index import index_shards

SAMPLES = 12
"""Of a shard."""
BAD_SHARD = 7
BAD_SAMPLE = BAD_SHARD * SAMPLES + 5
LIMIT_SECONDS = 500.0
"""More than the longest that a peer waits for one answer: 300 s and 20 pauses of 5 s, in datasets."""
EXIT_SECONDS = 30.0
"""Limit for the end of a process that has printed its result."""
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("no fault", {}),
    "delay": ("100 ms before each answer", {"seconds": 0.1}),
    "500": ("every fifth GET answered with 500", {"every": 5}),
    "reset": ("every fifth GET reset in the middle", {"every": 5}),
    "stall": ("one answer stops in the middle, without an end", {}),
    "no-ranges": ("ranges ignored", {}),
    "flip": ("one flipped bit in a sample's data", {}),
    "404": ("one shard missing (404)", {}),
}
"""Titles, and what faulty_files.py needs to know."""
OF_ONE_SHARD = ("stall", "flip", "404")
GOOD = ("right", "refused by name")
SILENT = "wrong or lost samples without an error"


class Reader(NamedTuple):
    """A reader of fault_reads.py: its title and package, who writes its format, and where its files are."""

    title: str
    package: str
    form: str
    files: str


READERS = {
    "tandem": Reader("tandem", "", "", "tar/*.tar"),
    "webdataset": Reader("webdataset {}", "webdataset", "", "tar/*.tar"),
    "litdata": Reader("litdata {} over obstore", "litdata", "litdata", "litdata/*.bin"),
    "datasets-tar": Reader("datasets {}, tar", "datasets", "", "tar/*.tar"),
    "datasets-parquet": Reader("datasets {}, Parquet", "datasets", "", "parquet/*.parquet"),
    "mosaic": Reader("Mosaic Streaming {}", "mosaicml-streaming", "mosaic-hashed", "mds/*.mds"),
    "mosaic-hashed": Reader(
        "Mosaic Streaming {} with validate_hash", "mosaicml-streaming", "mosaic-hashed", "mds/*.mds"
    ),
}


class Found(NamedTuple):
    """What one reader returned under one fault.

    `counts`: samples right, wrong, missing and twice. `named`: the error, or what was logged, has the name of
    a bad shard. `ended`: so did the process.
    """

    reader: str
    fault: str
    outcome: str
    counts: dict[str, int]
    named: bool
    ended: bool
    error: str
    seconds: float

    def text(self) -> str:
        count = self.counts
        bad = [f"{count[each]:,} {each}" for each in ("wrong", "missing", "twice") if count[each]]
        said = self.outcome
        if said.startswith("refused"):
            said += f", {count['right']:,} right before"
            said += "" if self.ended else ", the process does not end"
        elif said == "no end":
            said += f", {count['right']:,} right and {count['wrong']:,} wrong so far"
        elif bad:
            said += f": {', '.join(bad)}"
        if self.outcome == SILENT:
            said += f", {'' if self.named else 'not '}logged by name"
        return f"{said} ({self.seconds:.1f} s)"


def write_samples(folder: Path, shards: int) -> None:
    """Write the samples as tar shards with an index."""
    (folder / "tar").mkdir()
    names = [f"{shard:05}.tar" for shard in range(shards)]
    for shard, name in enumerate(names):
        files = []
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            files.append((f"{number:08}.bin", payload(number)))
            files.append((f"{number:08}.cls", str(number).encode()))
        write_shard(folder / "tar" / name, files)
    (folder / "shards.json").write_text(json.dumps(names))
    index_shards([str(folder / "tar" / name) for name in names], folder / "local.jsonl")


def write_parquet(folder: Path, shards: int) -> None:
    """Write the samples of each shard as a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    (folder / "parquet").mkdir()
    for shard in range(shards):
        numbers = range(shard * SAMPLES, (shard + 1) * SAMPLES)
        rows = pyarrow.table({"bin": list(map(payload, numbers)), "cls": list(numbers)})
        parquet.write_table(rows, folder / "parquet" / f"{shard:05}.parquet", compression="none")


def fault_for(name: str, reader: Reader, folder: Path) -> dict[str, Any]:
    """Return what faulty_files.py needs; for a fault of one shard, that is the one with BAD_SAMPLE."""
    fault = {"kind": name.replace("-", " "), **FAULTS[name][1]}
    if name in OF_ONE_SHARD:
        wanted = payload(BAD_SAMPLE)
        (path,) = (path for path in folder.glob(reader.files) if wanted in path.read_bytes())
        fault["shard"] = str(path.relative_to(folder))
        fault["offset"] = path.read_bytes().index(wanted) + len(wanted) // 2
    return fault


def read(name: str, python: str, fault_name: str, folder: Path, limit: float) -> Found:
    """Let a reader read everything once."""
    reader = READERS[name]
    fault = fault_for(fault_name, reader, folder)
    server = [sys.executable, str(ROOT / "benchmarks" / "faulty_files.py"), str(folder), json.dumps(fault)]
    with tempfile.TemporaryDirectory(prefix="shard-faults-", ignore_cleanup_errors=True) as new:
        own = Path(new)
        (own / "cache").mkdir()
        (own / "samples").touch()
        with started(server) as address:
            if name == "tandem":
                write_remote_index(folder, address)
            words = [name, address, str(own / "cache"), str(own / "samples")]
            began = time.perf_counter()
            result, ended, said = finished([python, str(PROGRAMS / "fault_reads.py"), *words], own, limit)
            seconds = time.perf_counter() - began
        lines = [line.split() for line in (own / "samples").read_text().splitlines()]
    bad = [fault["shard"]] if "shard" in fault else [str(path) for path in folder.glob(reader.files)]
    named = any(Path(path).name in said for path in bad)
    total = len(list(folder.glob("tar/*.tar"))) * SAMPLES
    counts = counted([(int(number), right == "1") for number, right in lines], total)
    error = clean((result or {}).get("error", ""), own, address)
    return Found(name, fault_name, outcome(result, named, counts), counts, named, ended, error, seconds)


def finished(command: list[str], own: Path, limit: float) -> tuple[dict[str, Any] | None, bool, str]:
    """Run a reader. Return its line of JSON, or None if it has no end; if its process ended; all it said."""
    with (own / "out").open("w") as out, (own / "err").open("w") as err:
        process = subprocess.Popen(
            command, env=variables(own), stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        end, printed = time.monotonic() + limit, False
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if not printed and result_of(own) is not None:
                printed, end = True, min(end, time.monotonic() + EXIT_SECONDS)
        ended = process.poll() is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with what the reader has started
        except ProcessLookupError:
            pass
        process.wait()
    found, logged = result_of(own), (own / "err").read_text(errors="replace")
    if ended and (found is None or process.returncode and "error" not in found):
        last = (logged.strip().splitlines() or ["no output"])[-1]
        found = {"error": f"ended with {process.returncode}: {last}"}
    elif found is not None and not ended and "error" not in found:
        found = None
    return found, ended, logged + (found or {}).get("said", "")


def result_of(own: Path) -> dict[str, Any] | None:
    lines = [line for line in (own / "out").read_text(errors="replace").splitlines() if line.startswith("{")]
    try:
        return dict(json.loads(lines[-1])) if lines else None
    except ValueError:  # not yet complete
        return None


def counted(lines: list[tuple[int, bool]], total: int) -> dict[str, int]:
    times = Counter(number for number, _ in lines)
    wrong = sum(not right for _, right in lines) + sum(not 0 <= number < total for number in times)
    return {
        "right": len({number for number, right in lines if right}),
        "wrong": wrong,
        "missing": sum(number not in times for number in range(total)),
        "twice": sum(count > 1 for count in times.values()),
    }


def outcome(result: dict[str, Any] | None, named: bool, counts: dict[str, int]) -> str:
    if result is None:
        return "no end"
    if "error" in result:
        if counts["wrong"] or counts["twice"]:
            return "wrong samples, then an error"
        return "refused by name" if named else "refused"
    lost = counts["wrong"] or counts["missing"] or counts["twice"]
    return SILENT if lost else "right"


def clean(text: str, own: Path, address: str) -> str:
    """Return an error without the folders of this machine."""
    text = text.replace(str(own), "OWN").replace(address, "http://SERVER")
    return re.sub(r"(?<![\w:/])(?:/[\w.+-]+){2,}/", "", text)[:300]


def row(fault: str, mine: Found, others: list[str]) -> Row:
    return Row(
        FAULTS[fault][0],
        1,
        mine.text(),
        "<br>".join(others),
        target="right, or refused by name",
        passed=mine.outcome in GOOD,
        seconds=mine.seconds,
    )


def measure(asked: argparse.Namespace) -> tuple[list[Row], list[Found]]:
    python, missing = interpreter(asked.peers_python)
    with tempfile.TemporaryDirectory(prefix="shard-faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_samples(folder, asked.shards)
        if not missing:
            write_parquet(folder, asked.shards)
        forms = {reader.form for reader in READERS.values()}
        failed = {form: missing or written(folder, python, form).get("error", "") for form in forms}
        errors = {each: failed[reader.form] for each, reader in READERS.items() if each != "tandem"}
        groups: dict[str, list[str]] = {}
        for each, reader in READERS.items():
            if not errors.get(each):
                # One after the other if they have the same files: processes of Streaming share memory.
                groups.setdefault(reader.form or each, []).append(each)

        def turns(readers: list[str]) -> list[Found]:
            found = []
            for each, fault in product(readers, asked.only):
                runs = sys.executable if each == "tandem" else python
                found.append(read(each, runs, fault, folder, asked.limit))
                told = f"{each}, {fault}: {found[-1].text()} {found[-1].error}"
                print(told, file=sys.stderr, flush=True)
            return found

        with ThreadPoolExecutor(asked.jobs) as pool:
            every = [found for group in pool.map(turns, groups.values()) for found in group]
    by = {(found.fault, found.reader): found for found in every}
    titles = {each: title(each, python, bool(errors.get(each))) for each in READERS}
    rows = []
    for fault in asked.only:
        others = [
            f"{titles[each]}: {error[:200] if error else by[fault, each].text()}"
            for each, error in errors.items()
        ]
        rows.append(row(fault, by[fault, "tandem"], others))
    return rows, every


def title(name: str, python: str, absent: bool) -> str:
    reader = READERS[name]
    release = "" if absent or not reader.package else versions(python, (reader.package,))[reader.package]
    return reader.title.format(release).replace(" ,", ",").strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=200, help=f"with {SAMPLES} samples each [200]")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="[500]")
    parser.add_argument("--jobs", type=int, default=2, help="readers at the same time [2]")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--json", type=Path, help="write the rows there, too, and what each reader returned")
    asked = parser.parse_args()
    if asked.shards * SAMPLES % BATCH or asked.shards <= BAD_SHARD:
        parser.error(f"--shards: expected a multiple of {BATCH // SAMPLES} above {BAD_SHARD}")
    rows, runs = measure(asked)
    code = finish(rows, None)
    if asked.json:
        save({"rows": list(map(asdict, rows)), "runs": [found._asdict() for found in runs]}, asked.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
