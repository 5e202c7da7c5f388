import time
from dataclasses import dataclass

import torch.distributed as dist
from small import Small


@dataclass
class Patient(Small):
    calls: int = 0

    def loss(self, model, batch):
        self.calls += model.training
        if model.training and self.calls <= 2 and dist.get_rank() == 1:
            time.sleep(3)  # as a compilation does: DDP's warm-up pass, and the first step
        return super().loss(model, batch)

    def evaluate_batch(self, model, batch):
        time.sleep(3 if dist.get_rank() == 1 else 0)
        return {"loss": (1.0, 1)}
