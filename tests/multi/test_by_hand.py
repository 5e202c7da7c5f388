"""Ranks that a person starts: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as tutorials teach."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem

TASK = """
import torch
from torch import nn
from tandem.data.datasets import Datasets, TensorRows

class Line:
    def build_model(self):
        return nn.Linear(4, 1)

    def build_datasets(self):
        rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        return Datasets(TensorRows(rows, rows.sum(1, keepdim=True)), TensorRows(rows, rows[:, :1]))

    def loss(self, model, batch):
        rows, targets = batch
        return nn.functional.mse_loss(model(rows), targets)
"""
FOREIGN = re.compile(r"TANDEM_|PET_|SLURM_|OMPI_|TORCHELASTIC_|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES")
SETTINGS = "--task line.py:Line --batch-size 24 --steps 8 --threads 1 --metrics-linger 0".split()
SETTINGS += ["--metrics-port", "0"]


@pytest.mark.timeout(180)
def test_two_ranks_by_hand_train_as_two_of_the_launcher(
    processes: Any, tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean["PYTHONPATH"] = str(Path(tandem.__file__).parents[1])

    def start(verb: str, run: str, *more: str, **variables: str) -> Any:
        command = [sys.executable, "-m", "tandem", verb, *SETTINGS, "--run-dir", run, *more]
        return processes.start(command, cwd=tmp_path, env={**clean, **variables})

    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    ranks = [start("train", "by-hand", **group, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    for process in ranks:
        code, output = processes.wait(process)
        assert code == 0, output
    summary = json.loads((tmp_path / "by-hand" / "summary.json").read_text())
    assert (summary["platform"], summary["world_size"], summary["nodes"]) == ("by-hand", 2, 1)
    code, output = processes.wait(start("launch", "launched", "--nproc", "2"))
    assert code == 0, output
    launched = json.loads((tmp_path / "launched" / "summary.json").read_text())
    assert summary["weights_sha256"] == launched["weights_sha256"]
