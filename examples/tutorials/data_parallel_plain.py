"""nn.DataParallel, as tutorials write it: one process, all its GPUs, and the sizes that each of them gets.

python examples/tutorials/data_parallel_plain.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Rows [B, 5] -> [B, 2]; says what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        y = self.linear(x)
        print(f"  inside: {len(x)} rows on {x.device}, {len(y)} out")
        return y


def rows():
    """Float32 [100, 5], and their first two columns."""
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2])


def main():
    torch.manual_seed(0)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(Net()).to(device)  # without a GPU it runs the model as it is
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, targets in DataLoader(rows(), batch_size=20, shuffle=True):
        optimizer.zero_grad()
        out = model(x.to(device))
        loss = nn.functional.mse_loss(out, targets.to(device))  # on the first GPU: it has more to do
        loss.backward()
        optimizer.step()
        print(f"outside: {len(x)} rows, loss {loss.item():.4f}")
    torch.save(model.module.state_dict(), "data_parallel.pt")


if __name__ == "__main__":
    main()
