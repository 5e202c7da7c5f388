import os

import torch
import torch.distributed as dist

assert not [name for name in os.environ if "SECRET" in name]
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)  # the next generation has a store of its own
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "by", os.environ["MASTER_ADDR"], flush=True)
dist.destroy_process_group()
