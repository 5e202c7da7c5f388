import time

from small import Small
from torch import distributed
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets


class Slow(Dataset):
    """Rows that take 2 ms each to read, so 24 ms for the 12 of a rank."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.rows[index]


class SlowLoader(Small):
    def build_datasets(self):
        both = super().build_datasets()
        return Datasets(Slow(both.train), both.evaluation)


class SlowRank(Small):
    def loss(self, model, batch):
        time.sleep(0.04 if distributed.get_rank() == 1 and model.training else 0)
        return super().loss(model, batch)
