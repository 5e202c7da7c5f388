"""A pipeline with micro-batches (GPipe) over the ranks of a job, by torch.distributed.pipelining.

    tandem launch --nproc 2 examples/pipeline.py [STEPS]

Plain torch, under `tandem launch`: rank 0 has the first stage, the last rank the last one. Each batch is cut
into micro-batches; while a stage computes one, the next stage has the one before. Prints the loss, and how
far the gradients of the first batch are from those of the whole model in one process.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, BATCH, MICRO_BATCHES = 32, 16, 4


def whole_model(stages: int) -> list[nn.Module]:
    """The same layers on every rank, of which each trains its own."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages - 1)]
    return [*layers, nn.Linear(WIDTH, 4)]


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x[:, :4].argmax(dim=1)


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = whole_model(size)
    mine = model[rank].to(device)
    schedule = ScheduleGPipe(
        PipelineStage(mine, rank, size, device), MICRO_BATCHES, loss_fn=nn.functional.cross_entropy
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    for step in range(steps):
        x, y = (part.to(device) for part in data(step))
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x, **({"target": y, "losses": losses} if size == 1 else {}))
        elif rank == size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        if step == 0:
            together = nn.Sequential(*whole_model(size)).to(device)
            nn.functional.cross_entropy(together(x), y).backward()
            pairs = zip(mine.parameters(), together[rank].parameters(), strict=True)
            off = max(float((one.grad - other.grad).abs().max()) for one, other in pairs)
            print(f"rank {rank}: gradients within {off:.0e} of the whole model's", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 10 == 9:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
