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
