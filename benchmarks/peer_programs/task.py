"""The workload as a tandem task."""

from typing import Any

import torch
import workload
from torch import Tensor, nn

from tandem.data.datasets import Datasets


class Peer:
    def __init__(self) -> None:
        self.record: workload.Record | None = None
        self.used: list[int] = []

    def build_model(self) -> nn.Module:
        self.model = workload.build_model()
        return self.model

    def build_datasets(self) -> Datasets:
        return Datasets(workload.rows(), None)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = workload.build_optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self.note())
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.used = batch[2].tolist()
        return workload.loss_of(model, batch)

    def note(self) -> None:
        """After each optimizer step. Batch norm counts the steps that are in the weights."""
        self.record = self.record or workload.Record()
        dist = torch.distributed
        (count,) = (each for name, each in self.model.named_buffers() if name.endswith("batches_tracked"))
        self.record.step(int(count), dist.get_rank(), dist.get_world_size(), self.used)
