"""The same as a task; the first GPU, which gathers and updates, may be given a smaller part of each batch.

tandem train --strategy dp:0.5 --task examples/tutorials/data_parallel_task.py:Rows \
    --batch-size 20 --epochs 1
"""

from data_parallel_plain import Net, rows  # the tutorial's network and data, as they are
from torch.nn.functional import mse_loss

from tandem import Datasets


class Rows:
    def build_model(self):
        return Net()

    def build_datasets(self):
        return Datasets(rows(), rows())

    def loss(self, model, batch):
        x, targets = batch
        return mse_loss(model(x), targets)
