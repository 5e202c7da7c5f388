"""plain.py with dlrover's Flash Checkpoint: to memory at each step, as its page advises, to disk every 50."""

import torch.distributed as dist
import workload
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = workload.build_model()
optimizer = workload.build_optimizer(model)
checkpoints = workload.folder() / "flash"
checkpointer = DdpCheckpointer(str(checkpoints))
done = workload.load(checkpointer.load_checkpoint(), model, optimizer)
for step in workload.steps(DistributedDataParallel(model), optimizer, done):
    to = StorageType.DISK if step % workload.SAVE_EVERY == 0 else StorageType.MEMORY
    state = workload.state_of(model, optimizer, step)
    checkpointer.save_checkpoint(step, state, str(checkpoints / f"{step}.pt"), storage_type=to)
