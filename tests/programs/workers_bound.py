import os
import time
from pathlib import Path


def warm_up(job, expected):
    Path(f".warm-{os.getpid()}").write_text(str(expected.position.local_rank))
    os.rename(f".warm-{os.getpid()}", f"warm-{os.getpid()}")


def rank(job, start):
    if start.position.nodes == 3:
        os._exit(134 if start.position.local_rank else 0)
    time.sleep(300)
