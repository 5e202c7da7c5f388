"""A training script as people have it: torchrun --nproc-per-node 2 examples/whole_script_plain.py"""

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, ACCUMULATE, RATE, PATIENCE = 6, 120, 2, 0.2, 3


def datasets():
    generator = torch.Generator().manual_seed(0)
    x, rule = torch.randn(7_200, 32, generator=generator), torch.randn(32, 10, generator=generator)
    y = (x @ rule + torch.randn(7_200, 10, generator=generator)).argmax(1)
    return TensorDataset(x[:6_000], y[:6_000]), TensorDataset(x[6_000:], y[6_000:])


def mixed_up(model, x, y):
    share, other = torch.distributions.Beta(0.2, 0.2).sample(), torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[other])
    return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[other])


def evaluated(model, loader):
    sums = torch.zeros(3)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            places = (model(x).topk(5).indices == y[:, None])
            sums += torch.tensor([places[:, 0].sum(), places.sum(), len(y)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = datasets()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH // ranks // ACCUMULATE, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=256, sampler=range(rank, len(val), ranks))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    steps = EPOCHS * (len(train) // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    best, worse, wrapped = 0.0, 0, None
    torch.manual_seed(rank)
    for epoch in range(EPOCHS):
        if epoch in (0, 1):
            model[0].requires_grad_(epoch >= 1)
            wrapped = nn.parallel.DistributedDataParallel(model)
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            wrapped.require_backward_grad_sync = number % ACCUMULATE == 0
            (mixed_up(wrapped, x, y) / ACCUMULATE).backward()
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(model)
        top1, top5 = evaluated(average, val_loader)
        if rank == 0:
            print(f"epoch {epoch + 1}: top1 {top1:.4f}, top5 {top5:.4f}", flush=True)
        worse, best = (0, top1) if top1 > best else (worse + 1, best)
        if worse == PATIENCE:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
