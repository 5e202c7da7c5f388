import os
import time

import torch
import torch.distributed as dist

print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open("computing", "w").close()
    time.sleep(60 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 1)
