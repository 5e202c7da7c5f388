"""The optimizer and the learning rate of each step."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tandem.config.slices import OptimisationConfig
from tandem.schedule import Cadence, learning_rate, scale_lr
from tandem.tasks.base import WholeTask


def build_optimizer(config: OptimisationConfig, task: WholeTask, model: nn.Module) -> torch.optim.Optimizer:
    """The task's own optimizer if it has one, else the one that the settings name.

    On GPUs it is a fused one, which can leave an update out without the host waiting (see `nonfinite.Guard`).
    """
    if (own := task.build_optimizer(model)) is not None:
        assert isinstance(own, torch.optim.Optimizer)
        return own
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
    return partial(
        learning_rate, peak=peak, warmup_steps=warmup, steps_planned=steps_planned, schedule=config.schedule
    )


class Schedule:
    """Sets the learning rate before each step: the settings' rule, or the task's own scheduler."""

    def __init__(
        self,
        config: OptimisationConfig,
        batch_size: int,
        task: WholeTask,
        optimizer: torch.optim.Optimizer,
        epoch_steps: int,
        planned: int,
    ) -> None:
        self._optimizer = optimizer
        self._own = task.build_scheduler(optimizer)
        self._rule = learning_rate_of(config, batch_size, epoch_steps, planned)
        self._fixed = "build_optimizer" in task.own

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
