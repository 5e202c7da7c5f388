"""`tandem doctor`: what it says, also where a place lacks something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tandem.data.block_cache import BlockCache
from tandem.data.tar_index import StoredBlock
from tandem.verify import doctor

MEMINFO = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n"


def run(*flags: str, **environ: str) -> tuple[int, dict[str, str]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    ended = subprocess.run(
        [sys.executable, "-m", "tandem", "doctor", *flags],
        capture_output=True, text=True, env={**clean, **environ}, timeout=patient(100),
    )  # fmt: skip
    assert not ended.stderr or ended.returncode, ended.stderr
    return ended.returncode, {line[:10].strip(): line[11:] for line in ended.stdout.splitlines()}


def test_it_names_the_versions_and_the_place(tmp_path: Path) -> None:
    import torch

    code, lines = run("--nodes", "3", "--run-dir", str(tmp_path / "run"))
    assert code == 0
    assert torch.__version__ in lines["torch"]
    assert lines["gloo"] == "available" and lines["NCCL"] and lines["CUDA"] and lines["cuDNN"]
    assert "writable" in lines["run dir"] and not (tmp_path / "run").exists()
    assert lines["placement"].startswith("node 0 of 3, ")
    assert {"driver", "GPUs", "cores", "memory", "/dev/shm", "data"} <= lines.keys()
    assert not list(tmp_path.iterdir()), "what it has tried is gone"


@pytest.mark.slow
def test_a_placement_that_contradicts_is_a_line_of_its_own() -> None:
    code, lines = run(RANK="1", WORLD_SIZE="2")
    assert code == 1 and lines["placement"].startswith("unknown: RANK=1")


@pytest.mark.slow
def test_a_setting_that_is_not_valid_is_an_error() -> None:
    assert run("--epochs", "x")[0] == 2


@pytest.mark.parametrize(("name", "text", "said"), [
    ("memory.max", "1073741824\n", "8.0 GiB, 4.0 available, limited to 1.0"),
    ("memory.max", "max\n", "8.0 GiB, 4.0 available"),
    ("memory/memory.limit_in_bytes", "2147483648\n", "8.0 GiB, 4.0 available, limited to 2.0"),
    ("memory/memory.limit_in_bytes", "9223372036854771712\n", "8.0 GiB, 4.0 available"),
    ("nothing", "", "8.0 GiB, 4.0 available"),
])  # fmt: skip
def test_memory_and_its_limit(tmp_path: Path, name: str, text: str, said: str) -> None:
    limit = tmp_path / "sys/fs/cgroup" / name
    limit.parent.mkdir(parents=True)
    limit.write_text(text)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    assert doctor.memory(tmp_path) == said


@pytest.mark.slow
def test_a_block_cache_is_a_line_with_its_limit_and_a_check_of_its_room(tmp_path: Path) -> None:
    code, lines = run(TMPDIR=str(tmp_path))
    assert code == 0 and lines["blocks"].endswith("no block cache") and not list(tmp_path.iterdir())
    folder = tmp_path / f"tandem-blocks-{os.getuid()}"
    cache = BlockCache(folder, 3 * doctor.GIB)
    block = StoredBlock("http://host/a.tar", 0, 1024**2, 1, 0)
    part = cache.reserve(block, urgent=False)
    assert part is not None
    cache.commit(part, block)
    code, lines = run(TMPDIR=str(tmp_path))
    assert code == 0 and "1 blocks with 0.0 of at most 3.0 GiB" in lines["blocks"]
    (finding,) = doctor.cache_findings(folder)
    assert (finding.state, finding.name) == ("pass", "block cache") and "at most 3.0 GiB" in finding.text
    BlockCache(folder, 2**50)
    (finding,) = doctor.cache_findings(folder)
    assert finding.state == "warn" and "cache_bytes" in finding.remedy and "GiB free" in finding.text
    assert not list(doctor.cache_findings(tmp_path / "none"))


def test_cudnn_counts_in_hundreds() -> None:
    assert doctor.dotted(92600) == "9.26.0" and doctor.dotted(90101) == "9.1.1" and doctor.dotted(None) == ""
