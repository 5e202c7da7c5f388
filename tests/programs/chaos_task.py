import time
from pathlib import Path

from tandem.tasks.digits import Digits


class WhileBroken(Digits):
    def loss(self, model, batch):
        if model.training and Path(__file__).with_name("slowly").exists():
            time.sleep(0.4)
        return super().loss(model, batch)
