import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", int(total), os.environ["LOCAL_WORLD_SIZE"], *sys.argv[1:], flush=True)
dist.destroy_process_group()
