import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets

ROWS = 240
WIDTH = 16_384  # more than Python's buffer of a file


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((4,), float(index)) + torch.randn(4)
        return x, index % 2


class Rows(Dataset):
    """Rows of a file that is opened once, as h5py, zipfile and tarfile do."""

    def __init__(self):
        path = Path("rows.bin")
        if not path.exists():
            path.write_bytes(b"".join(bytes([number]) * WIDTH for number in range(ROWS)))
        self.file = path.open("rb")

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.file.seek(index * WIDTH)
        time.sleep(0.002)  # another process seeks in the meantime
        row = torch.frombuffer(bytearray(self.file.read(WIDTH)), dtype=torch.uint8)
        return row[::4096].float() / ROWS, index % 2


class Loaded:
    def build_model(self):
        return nn.Linear(4, 2)

    def build_datasets(self):
        return Datasets(Noisy(), Noisy())

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)


class Opened(Loaded):
    def build_datasets(self):
        return Datasets(Rows(), Rows())
