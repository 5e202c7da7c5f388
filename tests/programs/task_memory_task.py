import os
import signal
from pathlib import Path

from small import Small


def die_at(place):
    wanted = Path("die-at")
    try:
        if wanted.read_text() != place:
            return
        wanted.rename(f"died-{os.getpid()}")  # one of the ranks
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Remembers(Small):
    def __init__(self):
        self.losses, self.average = [], None

    def after_step(self, model, step):
        die_at(f"step {step}")
        weight = next(model.parameters()).detach()
        self.average = weight.clone() if self.average is None else self.average.lerp(weight, 0.1)

    def after_evaluation(self, scores):
        die_at(f"evaluation {len(self.losses) + 1}")
        self.losses.append(scores["loss"])
        return len(self.losses) == 5

    def state_dict(self):
        return {"losses": list(self.losses), "average": self.average}

    def load_state_dict(self, state):
        self.losses, self.average = list(state["losses"]), state["average"]
