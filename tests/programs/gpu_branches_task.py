import os
import time
from pathlib import Path

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


def standing_by():
    found = 0
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            is_ours = int(parent) == os.getppid()
            found += is_ours and path.read_text() == "tandem-standby\n"
        except OSError:
            pass
    return found


class Small:
    steps = 0

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def build_datasets(self):
        x = torch.randn(2500, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:101], x[:101, :3].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        self.steps += model.training
        if self.steps == 9 and torch.distributed.get_rank() == 1 and os.path.exists("sticks"):
            os.remove("sticks")
            torch.cuda.Event.sticks = True  # type: ignore[attr-defined]
        if self.steps == 9 and torch.distributed.get_rank() == 1 and os.path.exists("dies"):
            while standing_by() < 2:
                time.sleep(0.05)
            os.remove("dies")
            os.kill(os.getpid(), 9)
        if self.steps == 9 and torch.distributed.get_rank() == 0 and os.path.exists("loses"):
            os.rename("loses", "gone")
            os.kill(os.getpid(), 9)
        if self.steps == 9 and torch.distributed.get_rank() == 0 and os.path.exists("fails"):
            os.remove("fails")
            error = torch.AcceleratorError("CUDA error: unspecified launch failure")
            error.error_code = 719  # type: ignore[attr-defined]
            raise error
        out = model(x)
        return nn.functional.cross_entropy(out, y), {"accuracy": ((out.argmax(1) == y).sum(), len(y))}
