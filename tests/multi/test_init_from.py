"""`--init-from` as people type it: what a run starts from, by both doors and shared out; what is refused."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import Scripts
from torch import nn

from needs import require_strategy
from program_files import program_text
from tandem.checkpoint.state import weights_sha256

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TASK = program_text("init_from_task")
LOOP = program_text("init_from_loop")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Saved as DDP has them, inside of more; the last layer is another one in other.pt."""
    (tmp_path / "layers.py").write_text(TASK)
    torch.manual_seed(5)
    state = nn.Sequential(nn.Linear(4, 33), nn.ReLU(), nn.Linear(33, 2)).state_dict()
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "own.pt")
    torch.save({**state, "2.weight": torch.ones(9, 33), "2.bias": torch.ones(9)}, tmp_path / "other.pt")
    torch.save({**state, "x": Hostile(tmp_path / "hit")}, tmp_path / "hostile.pt")
    return state


def train(processes: Any, folder: Path, verb: str, run: str, *flags: object) -> tuple[int, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    common = ["--task", "layers.py:Layers", "--batch-size", 16, "--steps", 2, "--lr", 0, "--device", "cpu"]
    common += ["--metrics", 0, "--metrics-linger", 0, "--run-dir", run]
    command = [sys.executable, "-m", "tandem", verb, *map(str, common), *map(str, flags)]
    code, output = processes.run(command, 250, cwd=folder, env=own)
    return int(code), str(output)


def test_two_ranks_that_share_the_parameters_start_from_them(
    tmp_path: Path, processes: Any, weights: dict[str, torch.Tensor]
) -> None:
    require_strategy("fsdp")
    flags = ("--nproc", 2, "--strategy", "fsdp", "--init-from", "own.pt", "--init-strict")
    code, output = train(processes, tmp_path, "launch", "run", *flags)
    assert code == 0, output
    assert "starting from own.pt: 100.0% of the model's parameters (233 of 233)" in output
    assert weights_sha256(weights) in (tmp_path / "run" / "summary.json").read_text()


def test_what_is_refused_is_one_line_and_2(
    tmp_path: Path, processes: Any, weights: dict[str, torch.Tensor]
) -> None:
    code, output = train(processes, tmp_path, "train", "hostile", "--init-from", "hostile.pt")
    assert code == 2 and "hostile.pt" in output and "it would run" in output, output
    assert not (tmp_path / "hit").exists() and "Traceback" not in output
    flags = ("--init-from", "other.pt", "--init-strict")
    code, output = train(processes, tmp_path, "train", "other", *flags)
    assert code == 2 and "Traceback" not in output, output
    assert "has 70.8% of the model's parameters (165 of 233), but --init-strict requires all" in output
    assert "wrong shape      2" in output and "loaded           2" in output


@pytest.mark.soak
def test_a_loop_of_ones_own_starts_from_them(
    tmp_path: Path, processes: Any, weights: dict[str, torch.Tensor]
) -> None:
    scripts = Scripts(tmp_path, processes)
    scripts.write("loop.py", LOOP)
    code, output = scripts.alone("loop.py", "run", TANDEM_INIT_FROM="own.pt")
    assert code == 0, output
    assert "loaded           4" in output and "missing          2" in output  # the average's
    ended = torch.load(tmp_path / "ended.pt", weights_only=True)
    assert all(torch.equal(ended[name], value) for name, value in weights.items())
