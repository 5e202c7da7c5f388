"""The optimizer and the learning rate of each step."""

from collections.abc import Callable

import torch
from torch import nn

from tandem.config import OptimisationConfig
from tandem.schedule import Cadence, learning_rate, scale_lr
from tandem.tasks.base import Task


def build_optimizer(config: OptimisationConfig, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The task's own optimizer if it has one, else the one that the settings name.

    On GPUs it is a fused one, which can leave an update out without the host waiting (see `nonfinite.Guard`).
    """
    own = getattr(task, "build_optimizer", None)
    if own is not None:
        optimizer = own(model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr, decay = config.lr, config.weight_decay
    fused = all(p.is_cuda for p in parameters) or None  # None: torch decides
    if config.optimizer == "sgd":
        momentum = config.momentum
        return torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=momentum > 0, fused=fused
        )
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, weight_decay=decay, fused=fused)


def learning_rate_of(
    config: OptimisationConfig, batch_size: int, steps_per_epoch: int, steps_planned: int
) -> Callable[[int], float]:
    """step (0-based, about to be taken) -> learning rate; a pure function, so nothing of it is saved."""
    peak = scale_lr(config.lr, config.lr_scaling, batch_size, config.lr_base_batch_size)
    warmup = Cadence.parse(config.warmup).to_steps(steps_per_epoch, steps_planned) or 0

    def at(step: int) -> float:
        return learning_rate(
            step, peak=peak, warmup_steps=warmup, steps_planned=steps_planned, schedule=config.schedule
        )

    return at


class Schedule:
    """Sets the learning rate before each step: the settings' rule, or the task's own scheduler."""

    def __init__(
        self,
        config: OptimisationConfig,
        batch_size: int,
        task: Task,
        optimizer: torch.optim.Optimizer,
        epoch_steps: int,
        planned: int,
    ) -> None:
        self._optimizer = optimizer
        build = getattr(task, "build_scheduler", None)
        self._own: torch.optim.lr_scheduler.LRScheduler | None = build(optimizer) if build else None
        self._rule = learning_rate_of(config, batch_size, epoch_steps, planned)
        self._fixed = hasattr(task, "build_optimizer")

    @property
    def is_by_settings(self) -> bool:
        """Whether the settings alone decide the rates: neither optimizer nor scheduler is the task's own."""
        return self._own is None and not self._fixed

    def set(self, step: int) -> float:
        """Prepare the optimizer for 0-based `step`; return the rate of its first group."""
        if self.is_by_settings:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rule(step)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """After a step: move the task's own scheduler on, if there is one."""
        if self._own is not None:
            self._own.step()

    def state(self) -> dict[str, object]:
        """What to save: empty unless the task brought a scheduler."""
        return self._own.state_dict() if self._own is not None else {}

    def load(self, state: dict[str, object]) -> None:
        """Restore the task's own scheduler."""
        if self._own is not None and state:
            self._own.load_state_dict(state)
