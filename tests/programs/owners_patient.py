import time
from pathlib import Path

from small import Small


class Patient(Small):
    def after_step(self, model, step):
        while step == 50 and not Path("go").exists():
            time.sleep(0.05)
