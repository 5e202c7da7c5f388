import time
from pathlib import Path

from small import Small


class Held(Small):
    def loss(self, model, batch):
        while model.training and Path("hold").exists() and Path("run/checkpoints/step-000000020").exists():
            time.sleep(0.05)
        return super().loss(model, batch)
