"""NCCL's watchdog aborts a rank that has lost a peer: neither a failed GPU, nor an incident of its node."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TASK = """
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows

VICTIMS = {1: 1, 2: 0}  # generation: the rank that is killed; the other one plays NCCL's watchdog


class Aborting:
    steps = 0

    def build_model(self):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return nn.Linear(8, 3)

    def build_datasets(self):
        x = torch.randn(480, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        self.steps += model.training
        generation = 1 + len(list(Path().glob("killed-*")))
        if self.steps == 4 and generation in VICTIMS:
            time.sleep(1)  # the agents hear that this generation has trained
            rank = torch.distributed.get_rank()
            if rank == VICTIMS[generation]:
                while not Path(f"waits-{generation}").exists():
                    time.sleep(0.01)
                Path(f"killed-{generation}").touch()
                os.kill(os.getpid(), 9)
            Path(f"waits-{generation}").touch()
            while not Path(f"killed-{generation}").exists():
                time.sleep(0.01)
            time.sleep(0.1)
            os.abort()
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
"""


def test_an_abort_for_a_lost_peer_spends_no_budget(processes: Any, tmp_path: Path) -> None:
    """Each node has one killed rank, and one aborted: with a budget of one, the abort must not count."""
    (tmp_path / "aborting.py").write_text(TASK)
    words = ["--nodes", 2, "--task", "aborting.py:Aborting", "--batch-size", 24, "--steps", 12]
    words += ["--max-restarts", 1, "--device", "cpu", "--eval-every", "never", "--metrics", 0]
    words += ["--metrics-linger", 0, "--run-dir", "run"]
    command = [sys.executable, "-m", "tandem", "launch", *map(str, words)]
    code, said = processes.run(command, cwd=tmp_path)
    assert code == 0, said
    assert "rank 1 on node 1 was killed (SIGKILL)" in said and "rank 0 on node 0 was killed (SIGKILL)" in said
    assert "SIGABRT" not in said and "budget" not in said, said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    killed = [(each["rank"], each["signal"]) for each in events if each["kind"] == "rank_killed"]
    assert killed == [(1, "SIGKILL"), (0, "SIGKILL")]
