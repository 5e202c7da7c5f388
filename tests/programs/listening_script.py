import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=200))
for step in range(10_000):
    dist.all_reduce(torch.ones(1))
    if step == 3 and dist.get_rank() == 0:
        open("trains", "w").close()
    time.sleep(0.02)
