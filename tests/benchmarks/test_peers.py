"""benchmarks/peers.py: a trial of tandem's task, a peer that cannot be installed, and what a page shows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient

ROOT = Path(__file__).parents[2]
PROGRAM, RESULTS = ROOT / "benchmarks" / "peers.py", ROOT / "benchmarks" / "results"


def measured(processes: Any, folder: Path, *words: object, **variables: str) -> dict[str, Any]:
    """What the benchmark writes."""
    found = folder / "peers.json"
    command = [sys.executable, PROGRAM, "--environments", folder / "environments", "--json", found, *words]
    code, said = processes.run(list(map(str, command)), limit=280, env={**os.environ, **variables})
    assert code == 0, said[-3000:]
    return dict(json.loads(found.read_text()))


def shown(results: Path) -> str:
    """compared.md as these results make it."""
    words = ("--results", str(results), "--print", "docs/compared.md")
    command = [sys.executable, str(PROGRAM.with_name("page.py")), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(60)).stdout


@pytest.mark.multi
@pytest.mark.timeout(600)
def test_a_killed_rank_of_a_task_costs_no_sample(tmp_path: Path, processes: Any) -> None:
    found = measured(processes, tmp_path, "--trials", 1, "--only", "task")
    (trial,) = found["contenders"]["task"]["trials"]
    assert trial["ended"] == "" and trial["step"] > 0 and trial["megabytes"] > 0
    assert 0 < trial["next_step"] <= trial["all_ranks"] and trial["first_step"] > 0
    assert (trial["lost"], trial["twice"]) == (0, 0)
    assert trial["repeated_steps"] <= 1, "a kill between a step and its snapshot costs that step"
    assert found["contenders"]["task"]["versions"]["torch"] and found["machines"]["task"]["cores"]


@pytest.mark.timeout(300)
def test_a_peer_that_cannot_be_installed_is_a_row_and_the_others_stay(
    tmp_path: Path, processes: Any
) -> None:
    """The installer finds no index: a directory without one, and no other source of packages."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    other = {"title": "other", "settings": "none", "versions": {}, "packages": "", "error": "", "trials": []}
    known = {"machines": {"ray": {"cores": 2, "time": "2026-01-01"}}, "contenders": {"ray": other}}
    (tmp_path / "peers.json").write_text(json.dumps(known))
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    found = measured(processes, tmp_path, "--trials", 1, "--only", "torchft", **offline)
    entry = found["contenders"]["torchft"]
    assert found["contenders"]["ray"] == other and entry["trials"] == []
    assert entry["error"].startswith("not installed: ERROR: No matching distribution")
    page = shown(tmp_path)
    assert "| torchft |  | 0 | **not measured** |" in page
    assert "Not measured: not installed: ERROR: No matching distribution found for torchft-nightly" in page


def test_the_page_shows_the_median_the_worst_and_what_did_not_recover(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    trial = {"first_step": 5.0, "megabytes": 1200.4, "rank": 0, "step": 9, "next_step": 1.0, "all_ranks": 2.0}
    trial |= {"repeated_steps": 3, "lost": 0, "twice": 64, "ended": ""}
    slow = trial | {"next_step": 3.0, "all_ranks": 8.0}
    stuck = trial | {"next_step": None, "all_ranks": None, "ended": "no recovery in 150 s: a | b"}
    entry = {"title": "peer", "settings": "as it is", "versions": {"peer": "1.2"}, "error": ""}
    machine = {"cores": 2, "time": "2026-01-01", "commit": "abc1234", "command": "peers.py"}
    found = {"machines": {"torchft": machine}, "contenders": {"torchft": {**entry, "trials": [trial, slow]}}}
    (tmp_path / "peers.json").write_text(json.dumps(found))
    row = "| peer | peer 1.2 | 2 | 2.00 s (3.00 s) | 5.00 s (8.00 s) | 5.00 s | 1,200 MB | 3 | 0 | 64 |"
    assert row in shown(tmp_path) and "commit abc1234" in shown(tmp_path)
    found["contenders"]["torchft"] = {**entry, "trials": [trial, stuck]}
    (tmp_path / "peers.json").write_text(json.dumps(found))
    assert "| peer | peer 1.2 | 1 of 2 recover | 1.00 s | 2.00 s |" in shown(tmp_path)
    reason = "1 did not recover, the last: no recovery in 150 s: a / b."
    assert f"- **peer:** as it is. {reason}" in shown(tmp_path)
