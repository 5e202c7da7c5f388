"""whole_script_plain.py as a task: tandem launch --nodes 2 --task examples/whole_script.py:Whole --epochs 6
--batch-size 120 --micro-batch-size 30"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from tandem import Datasets


class Whole:
    best, worse = 0.0, 0

    def build_model(self):
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def place(self, model, device):
        self.average = AveragedModel(model.to(device), device, multi_avg_fn=get_ema_multi_avg_fn(0.98))

    def build_datasets(self):
        generator = torch.Generator().manual_seed(0)
        x, rule = torch.randn(7_200, 32, generator=generator), torch.randn(32, 10, generator=generator)
        y = (x @ rule + torch.randn(7_200, 10, generator=generator)).argmax(1)
        return Datasets(TensorDataset(x[:6_000], y[:6_000]), TensorDataset(x[6_000:], y[6_000:]))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)

    def build_scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total_steps)

    def freeze(self, model, epoch):
        model[0].requires_grad_(epoch >= 1)

    def loss(self, model, batch):
        x, y = batch
        share, other = torch.distributions.Beta(0.2, 0.2).sample(), torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[other])
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[other])

    def after_step(self, model, step):
        self.average.update_parameters(model)

    def evaluate_batch(self, model, batch):
        places = self.average(batch[0]).topk(5).indices == batch[1][:, None]
        return {"top1": (places[:, 0].sum(), len(places)), "top5": (places.sum(), len(places))}

    def after_evaluation(self, scores):
        self.worse = 0 if scores["top1"] > self.best else self.worse + 1
        self.best = max(self.best, scores["top1"])
        return self.worse == 3

    def state_dict(self):
        return {"best": self.best, "worse": self.worse, "average": self.average.state_dict()}

    def load_state_dict(self, state):
        self.best, self.worse = state["best"], state["worse"]
        self.average.load_state_dict(state["average"])
