"""One optimizer step: forward, backward, accumulation, clipping, precision. Nothing else is in here."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.cluster.pulse import Pulse
from tandem.cluster.world import Agreed, AgreedReader, Telemetry, World
from tandem.config import Settings
from tandem.data.loader import batch_size_of
from tandem.tasks.base import Task
from tandem.training.seeding import seed_micro_step

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Proposal:
    """What this rank brings into a step: a stop request, and (rank 0's count) decisions as bits."""

    stop: bool = False
    decisions: int = 0


class TrainingModule(nn.Module):
    """The task's loss as a module, so that DDP sees forward and loss as one."""

    def __init__(self, task: Task, model: nn.Module, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._device_type = device.type
        self._precision = precision

    def forward(
        self, batch: Any, weight: float, scale: Tensor, so_far: Tensor
    ) -> tuple[Tensor, Tensor, Any, Tensor]:
        """(scaled loss for backward, weighted loss, task metrics, weighted losses of the step so far)."""
        with self._autocast():
            outcome = self._task.loss(self.model, batch)
        loss, metrics = outcome if isinstance(outcome, tuple) else (outcome, {})
        loss = loss.float() * weight
        return loss * scale, loss, metrics, so_far + loss.detach()

    def _autocast(self) -> Any:
        dtype = AUTOCAST.get(self._precision)
        return torch.autocast(self._device_type, dtype=dtype) if dtype is not None else nullcontext()


@dataclass
class PhaseSeconds:
    """Host seconds of one step by phase; on GPUs what the host saw, not the kernels."""

    transfer: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


class Stepper:
    """Takes optimizer steps with the model wrapped in DDP.

    `weights` inside make the gradient that of the global mean: a micro-batch of n samples weighs
    n * world_size / batch_size, whether the shares of the ranks are equal or not.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pulse: Pulse,
    ) -> None:
        self._pulse = pulse
        self._world, self._settings, self._optimizer = world, settings, optimizer
        trained = torch.compile(model) if settings.compile else model
        assert isinstance(trained, nn.Module)
        inner = TrainingModule(task, trained, world.device, settings.precision)
        self._ddp = world.wrap(Telemetry(inner).to(world.device))
        self._carrier: nn.Parameter = self._ddp.module.carrier
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._model = model
        self._reader = AgreedReader(world)
        self._seed = settings.seed
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
        self.grad_norm: Tensor | None = None
        self.phases = PhaseSeconds()

    def settle_buckets(self, micro_batches: Sequence[Any], step: int) -> None:
        """Make DDP rebuild its buckets before the first real step, at a start and at a resume alike.

        DDP reduces its first step in initial buckets and later ones in rebuilt ones; another layout sums
        in another order, so a resumed run would differ in its first step (seen from 3 ranks on).
        Gradients are thrown away, buffers are put back; the random state is set anew by each step.
        """
        before = [buffer.clone() for buffer in self._model.buffers()]
        self._accumulate(micro_batches, step, Proposal())
        self._reset_gradients()
        for buffer, old in zip(self._model.buffers(), before, strict=True):
            buffer.copy_(old)
        self._ddp.train()  # type: ignore[no-untyped-call]
        self.phases = PhaseSeconds()

    def take(self, micro_batches: Sequence[Any], step: int, proposal: Proposal) -> Agreed | None:
        """One optimizer step on this rank's micro-batches; what the ranks agreed on (see AgreedReader)."""
        self.phases = PhaseSeconds()
        self._accumulate(micro_batches, step, proposal)
        started = time.perf_counter()
        self._pulse.enter("optimizer")
        agreed = self._reader.read(step, self._carrier)
        if agreed is None or not agreed.non_finite:
            self._update()
        self._reset_gradients()
        self.phases.optimizer = time.perf_counter() - started
        return agreed

    def drain(self) -> Agreed | None:
        """What the last step on a GPU agreed on."""
        return self._reader.drain()

    def _accumulate(self, micro_batches: Sequence[Any], step: int, proposal: Proposal) -> None:
        scale = self.scaler.scale(torch.ones((), device=self._world.device))  # 1 without fp16
        so_far = torch.zeros((), device=self._world.device)
        last = len(micro_batches) - 1
        for micro_step, batch in enumerate(micro_batches):
            t0 = time.perf_counter()
            self._pulse.enter("forward")
            weight = batch_size_of(batch) * self._world.size / self._settings.batch_size
            values = torch.tensor(
                [float(proposal.stop), float(micro_step == last), 0.0, float(proposal.decisions)]
            )
            values = values.to(self._world.device, non_blocking=True)
            t1 = time.perf_counter()
            seed_micro_step(self._seed, step, micro_step, self._world.rank)
            with self._world.without_sync(self._ddp, skip=micro_step != last):
                scaled, loss, _metrics = self._ddp(values, batch, weight, scale, so_far)
                t2 = time.perf_counter()
                self._pulse.enter("backward")
                scaled.backward()
            so_far = so_far + loss.detach()
            t3 = time.perf_counter()
            self.phases.transfer += t1 - t0
            self.phases.forward += t2 - t1
            self.phases.backward += t3 - t2

    def _update(self) -> None:
        self.scaler.unscale_(self._optimizer)
        if self._settings.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _reset_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        self._carrier.grad = None if self._carrier.grad is None else self._carrier.grad.zero_()
