"""The digits task with a pause in every step, so that a fault occurs in the middle of a short run."""

import time
from dataclasses import dataclass

from tandem.tasks.digits import Digits


@dataclass
class SlowDigits(Digits):
    """Sleeps for `pause` seconds in each training step."""

    pause: float = 0.05

    def loss(self, model, batch):  # type: ignore[no-untyped-def]
        if model.training:
            time.sleep(self.pause)
        return super().loss(model, batch)
