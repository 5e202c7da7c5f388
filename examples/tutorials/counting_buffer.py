"""A loop of one's own: logistic regression with buffers that count, each rank for itself and all together.

tandem launch --nproc 2 examples/tutorials/counting_buffer.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import tandem

BATCH, EPOCHS = 16, 3  # a batch of all ranks together


class LogisticRegression(nn.Module):
    """Rows [B, 2] -> logits [B]; counts the rows it was trained with whose first number is above zero."""

    positives: Tensor
    everywhere: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("positives", torch.zeros((), dtype=torch.int64))
        self.register_buffer("everywhere", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            found = (x[:, 0] > 0).sum()
            self.positives += found  # rank 0's count comes before every forward, as with DDP
            if dist.is_initialized():
                dist.all_reduce(found)
            self.everywhere += found  # the same on all ranks, so nothing is lost
        return self.linear(x).squeeze(1)


def rows() -> TensorDataset:
    """Float32 [256, 2], and whether their sum is above zero."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).float())


run = tandem.start()
model = run.wrap(LogisticRegression())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
run.keep(model=model, optimizer=optimizer)
seen = last = 0
for x, y in run.batches(rows(), batch_size=BATCH, epochs=EPOCHS):
    optimizer.zero_grad()
    loss = binary_cross_entropy_with_logits(model(x), y)
    run.backward(loss)
    optimizer.step()
    last = int((x[:, 0] > 0).sum())
    seen += last
print(
    f"rank {run.rank}: saw {seen}, {last} of them last; "
    f"its buffer says {model.positives.item()}, all ranks {model.everywhere.item()}"
)
