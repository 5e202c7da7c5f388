"""Two evaluation sets, a score of all outputs (AUC), and an end when it no longer grows.

    tandem launch --nodes 2 --task examples/evaluations.py:Spam --eval-every 20 --keep-best val/auc
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem import Datasets


def auc(score: torch.Tensor, label: torch.Tensor) -> float:
    """How often a positive one is above a negative one (Mann and Whitney)."""
    ranks = torch.empty_like(score).scatter_(0, score.argsort(), torch.arange(1.0, len(score) + 1))
    positive, negative = int(label.sum()), int((1 - label).sum())
    return float((ranks[label == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


@dataclass
class Spam:
    patience: int = 3

    def __post_init__(self):
        self.best, self.worse = 0.0, 0

    def build_model(self):
        return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def build_datasets(self):
        x = torch.randn(6_000, 20, generator=torch.Generator().manual_seed(0))
        y = (x[:, :5].sum(1) + 0.5 * x[:, 5] * x[:, 6] > 0).float()
        train, val, test = (TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 4800), (4800, 5400), (5400, 6000)))
        return Datasets(train, {"val": val, "test": test})

    def loss(self, model, batch):
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    def evaluate_batch(self, model, batch):
        score, label = model(batch[0]).squeeze(1), batch[1]
        loss = nn.functional.binary_cross_entropy_with_logits(score, label, reduction="sum")
        return {"loss": (loss, len(label))}, {"score": score, "label": label}

    def evaluate_all(self, outputs):
        return {"auc": auc(outputs["score"], outputs["label"])}

    def after_evaluation(self, scores):
        self.worse = 0 if scores["val/auc"] > self.best else self.worse + 1
        self.best = max(self.best, scores["val/auc"])
        return self.worse == self.patience

    def state_dict(self):
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state):
        self.best, self.worse = state["best"], state["worse"]
