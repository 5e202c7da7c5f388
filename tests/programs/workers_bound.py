import os
import time
from pathlib import Path


def warm_up(job, expected):
    Path(f".warm-{os.getpid()}").write_text(str(expected.local_rank))
    os.rename(f".warm-{os.getpid()}", f"warm-{os.getpid()}")


def rank(job, position):
    if position.nodes == 3:
        os._exit(134 if position.local_rank else 0)
    time.sleep(300)
