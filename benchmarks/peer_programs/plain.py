"""A plain DDP script that saves every 50 steps and resumes at the exact step.

torchrun, ft_launcher and `tandem launch` start it unchanged.
"""

import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = workload.build_model()
optimizer = workload.build_optimizer(model)
done = workload.load(workload.saved(), model, optimizer)
for step in workload.steps(DistributedDataParallel(model), optimizer, done):
    if dist.get_rank() == 0 and step % workload.SAVE_EVERY == 0:
        workload.save(workload.state_of(model, optimizer, step))
