"""Classify your own pictures with a torchvision or timm model that is chosen by name.

    tandem launch --nodes 2 --task examples/recipes/images.py:Images --data-dir data/flowers --epochs 30

Pictures are in data-dir/train/CLASS and data-dir/val/CLASS. docs/recipes.md explains it.
"""

import importlib.util
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision import datasets, models
from torchvision.transforms import v2

from tandem import Datasets
from tandem.errors import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pretrained weights expect


@dataclass
class Images:
    data_dir: Path = Path("data")
    model: str = "resnet18"  # of torchvision, or timm:NAME
    size: int = 224  # pixels
    smoothing: float = 0.1  # of the labels, in training
    lr: float = 1e-3
    weight_decay: float = 0.05

    def build_model(self) -> nn.Module:
        library, _, name = self.model.rpartition(":")
        if library == "timm" and importlib.util.find_spec("timm") is None:
            raise ConfigError(f"--task.model {self.model} needs the package timm: pip install timm")
        if library == "timm":
            import timm

            known, create = timm.list_models(), timm.create_model
        else:
            known, create = models.list_models(module=models), models.get_model
        if library not in ("", "timm") or name not in known:
            near = ", ".join(get_close_matches(name, known, n=3)) or "resnet18"
            raise ConfigError(f"--task.model: no model {self.model!r}; expected {near}, or timm:NAME")
        return create(name, num_classes=len(self._classes("train")))

    def build_datasets(self) -> Datasets:
        if (train := self._classes("train")) != (val := self._classes("val")):
            different = ", ".join(sorted(set(train) ^ set(val)))
            raise ConfigError(f"{self.data_dir}: {different} is in train or val alone; expected in both")
        finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        cut = [v2.RandomResizedCrop(self.size, scale=(0.35, 1.0)), v2.RandomHorizontalFlip()]
        center = [v2.Resize(self.size * 8 // 7), v2.CenterCrop(self.size)]
        # Each sample has a seed of its own, so a resumed run augments as one without a break.
        augment = [v2.PILToTensor(), *cut, v2.TrivialAugmentWide(), *finish, v2.RandomErasing(p=0.1)]
        evaluate = [v2.PILToTensor(), *center, *finish]
        return Datasets(
            datasets.ImageFolder(self.data_dir / "train", v2.Compose(augment)),
            datasets.ImageFolder(self.data_dir / "val", v2.Compose(evaluate)),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, without weight decay for biases and the scales of norms."""
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        decayed = {"params": weights, "weight_decay": self.weight_decay}
        return torch.optim.AdamW([decayed, {"params": others, "weight_decay": 0.0}], lr=self.lr)

    def build_scheduler(self, optimizer, total_steps: int):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=total_steps, pct_start=0.1)

    def loss(self, model: nn.Module, batch):
        pictures, labels = batch
        logits = model(pictures)
        smoothing = self.smoothing if model.training else 0.0
        best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        count = torch.tensor(len(labels), device=labels.device)
        scores = {"accuracy": (best[:, 0].sum(), count), "top5": (best.sum(), count)}
        return cross_entropy(logits, labels, label_smoothing=smoothing), scores

    def _classes(self, part: str) -> list[str]:
        found = sorted(entry.name for entry in (self.data_dir / part).glob("[!.]*") if entry.is_dir())
        if not found:
            raise ConfigError(f"{self.data_dir / part} has no folders; expected {part}/CLASS/*.jpg")
        return found
