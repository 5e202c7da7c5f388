"""Models, optimizers and outputs that plain DDP trains, as a task, a custom loop and a script, killed midway.

All of a row ends with the bits of plain DDP, or one entry point refuses it by a line before the first step.
ZOO_ROWS names some rows, with | between.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_ranks import differences
from zoo_rows import ZOO

from patience import patient

pytestmark = [pytest.mark.multi, pytest.mark.faults]
HERE = Path(__file__).parent
ALL = os.environ.get("ZOO_ROWS", "|".join(ZOO)).split("|")
EACH_KIND = (
    *("tuple", "dataclass", "function", "dicts and text", "sparse embedding", "sparse bag, SparseAdam"),
    *("complex", "batchnorm", "LSTM", "weight norm", "reentrant checkpointing", "unused parameters"),
    *("buffer grown", "lazy linear", "LBFGS", "SAM", "parameter groups", "two optimizers", "GradScaler"),
)
"""One row of each kind of output, model and optimizer; `make soak` runs them all."""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {"OMP_NUM_THREADS": "1", "TANDEM_THREADS": "1", "TEST_PATIENCE": str(patient(1.0))}


def tasks_and_loops(names: list[str], folder: Path, processes: Any, limit: float) -> dict[str, str]:
    """What differs from plain DDP, by row and entry point; also leaves plain DDP's states in `folder`."""
    command = [sys.executable, str(HERE / "zoo_ranks.py"), str(folder), *names]
    code, output = processes.run(command, limit, env=environment(folder))
    assert code == 0, output
    told = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return {f"{name}, {entry}": outcome for name, entry, outcome in told}


def scripts(names: list[str], folder: Path, processes: Any, limit: float) -> dict[str, str]:
    """The same of one script under `tandem launch`, which is killed in each row; after `tasks_and_loops`."""
    words = ["--nproc", "2", "--run-dir", str(folder / "launched"), "--max-restarts", str(len(names) + 3)]
    words += ["--metrics", "0", "--metrics-linger", "0", str(HERE / "zoo_ranks.py"), "--script"]
    command = [sys.executable, "-m", "tandem", "launch", *words, str(folder), *names]
    code, output = processes.run(command, limit, env=environment(folder) | {"ZOO_KILL": "1"})
    assert code == 0, output[-5000:]
    assert output.count("was killed (SIGKILL)") >= len(names), output[-5000:]
    pairs = {name: [folder / f"{name}.{by}.pt" for by in ("control", "script")] for name in names}
    return {f"{name}, script": differences(*map(torch.load, pair)) for name, pair in pairs.items()}


def refused(names: list[str]) -> dict[str, str]:
    return {f"{name}, {entry}": "line" for name in names for entry in ZOO[name].lines}


def proved(names: list[str], folder: Path, processes: Any, limit: float) -> None:
    found = tasks_and_loops(names, folder, processes, limit) | scripts(names, folder, processes, limit)
    assert {each: outcome for each, outcome in found.items() if outcome} == refused(names)
    scaled = sum(bool(ZOO[name].scaler) for name in names)
    assert len(found) == 3 * len(names) - scaled, "a task's own GradScaler is --precision fp16"


@pytest.mark.timeout(900)
def test_a_row_of_each_kind_trains_as_with_plain_ddp(tmp_path: Path, processes: Any) -> None:
    proved(list(EACH_KIND), tmp_path, processes, 400)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_whole_zoo_trains_as_with_plain_ddp(tmp_path: Path, processes: Any) -> None:
    assert len(ZOO) >= 30
    proved(ALL, tmp_path, processes, 600)
