import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from small import Small


@dataclass
class Leaving(Small):
    how: str = ""
    calls: int = 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            once = Path(f"left-{dist.get_rank()}")
            if self.calls == 60 and not once.exists():
                once.touch()
                if self.how == "sleep" and dist.get_rank() == 1:
                    time.sleep(1000)
                if self.how == "skip" and dist.get_rank() != 1:
                    dist.barrier()
        return super().loss(model, batch)
