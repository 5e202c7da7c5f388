"""The usual hand-written solution: DDP under torchrun that saves every few steps and resumes after a crash.

It gets some of tandem's guarantees: data and seeds that depend on the step, no dropout, a saved optimizer,
and a checkpoint that is replaced atomically. The remaining cause of differences is DDP's first step, which
sums in other buckets.

    torchrun --nproc-per-node 3 --max-restarts 1 benchmarks/naive_ddp.py FOLDER KILL_AT     (0: no kill)
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hard_task import CLASSES, FEATURES, Net

STEPS, SAVE_EVERY = 40, 5


def main(folder: Path, kill_at: int) -> None:
    signal.alarm(170)  # torchrun leaves its ranks behind when it is killed for taking too long
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, STEPS):
        if step == kill_at and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * world_size + rank)
        inputs = torch.randn(8, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (8,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(checkpoint)
    if rank == 0:
        total = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            total.update(name.encode() + value.numpy().tobytes())
        (folder / "weights").write_text(f"{total.hexdigest()} {first}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
