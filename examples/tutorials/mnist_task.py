"""The same as a task: what mnist_ddp.py says about ranks, samplers, devices and files is tandem's.

tandem launch --nproc 2 --task examples/tutorials/mnist_task.py:Mnist --batch-size 120 --lr 0.02
"""

from dataclasses import dataclass
from pathlib import Path

from mnist_ddp import Net, mnist  # the tutorial's network and data, as they are
from torch.nn.functional import cross_entropy

from tandem import Datasets


@dataclass
class Mnist:
    data_dir: Path = Path("data")
    download: bool = False

    def prepare(self):
        mnist(self.data_dir, True, self.download)

    def build_model(self):
        return Net()

    def build_datasets(self):
        return Datasets(mnist(self.data_dir, True), mnist(self.data_dir, False))

    def loss(self, model, batch):
        pictures, labels = batch
        logits = model(pictures)
        right = (logits.argmax(1) == labels).sum()
        return cross_entropy(logits, labels), {"accuracy": (right, len(labels))}
