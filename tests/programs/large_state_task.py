"""Each step changes a part of a large state. Each rank notes the steps of its snapshots; rank 1 may die."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from small import Small
from torch import nn


@dataclass
class Large(Small):
    megabytes: int = 1
    notes: str = "notes"
    last: int = 0  # rank 1 dies here at the latest, or not at all
    step = 0

    def build_model(self):
        model = super().build_model()
        model.rows = nn.Parameter(torch.zeros(self.megabytes, 2**18), requires_grad=False)
        return model

    def after_step(self, model, step):
        self.step = step
        with torch.no_grad():
            model.rows[step % self.megabytes].add_(model[0].weight.sum() * step)
        died = Path(self.notes, "died")
        if self.last and dist.get_rank() == 1 and not died.exists():
            taken = [int(line) for line in self.note().read_text().split()] if self.note().exists() else []
            if step == self.last or (len(taken) >= 4 and taken[-1] < step - 1):
                died.write_text(f"{step} {taken[-1]}")
                os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        """Every snapshot asks for this, and so does a save."""
        if self.step:
            with self.note().open("a") as file:
                file.write(f"{self.step}\n")
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def note(self):
        return Path(self.notes, f"rank-{dist.get_rank()}")
