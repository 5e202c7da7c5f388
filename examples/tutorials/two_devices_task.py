"""The same as a task: `place` puts the halves where they belong, and no rank has to count devices.

tandem launch --nproc 2 --devices-per-rank 2 --task examples/tutorials/two_devices_task.py:Rows
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from two_devices_plain import TwoDevices  # the tutorial's model, as it is

from tandem import Datasets


class Rows:
    def build_model(self):
        return TwoDevices("cpu", "cpu")

    def place(self, model, first, second):
        model.devices = first, second
        model.first.to(first)
        model.second.to(second)

    def build_datasets(self):
        x = torch.randn(800, 10, generator=torch.Generator().manual_seed(1))
        rows = TensorDataset(x, x[:, :5])
        return Datasets(rows, rows)

    def loss(self, model, batch):
        x, targets = batch
        out = model(x)
        return mse_loss(out, targets.to(out.device))
