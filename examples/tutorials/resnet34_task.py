"""resnet34 on a folder of pictures: SyncBatchNorm, pretrained weights with another head, resumed runs.

tandem launch --nproc 2 --task examples/tutorials/resnet34_task.py:Resnet34 --sync-batchnorm \
    --init-from resnet34.pth --lr 0.01 --lr-scaling linear:16
"""

from dataclasses import dataclass
from pathlib import Path

from torch.nn.functional import cross_entropy
from torchvision import datasets, models, transforms

from tandem import Datasets

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass
class Resnet34:
    """`data_dir`/train/CLASS/*.png and `data_dir`/val/CLASS/*.png; `freeze_layers` trains the head alone."""

    data_dir: Path = Path("data")
    image_size: int = 224
    freeze_layers: bool = False

    def build_model(self):
        model = models.resnet34(num_classes=len(self.folder("train", None).classes))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.freeze_layers or name.startswith("fc."))
        return model

    def build_datasets(self):
        cut = [transforms.RandomResizedCrop(self.image_size), transforms.RandomHorizontalFlip()]
        center = [transforms.Resize(self.image_size * 8 // 7), transforms.CenterCrop(self.image_size)]
        return Datasets(self.folder("train", cut), self.folder("val", center))

    def folder(self, part, cut):
        as_tensor = [transforms.ToTensor(), NORMALIZE]
        return datasets.ImageFolder(self.data_dir / part, transforms.Compose([*(cut or []), *as_tensor]))

    def loss(self, model, batch):
        pictures, labels = batch
        logits = model(pictures)
        right = (logits.argmax(1) == labels).sum()
        return cross_entropy(logits, labels), {"accuracy": (right, len(labels))}
