"""One optimizer step: forward, backward, accumulation, clipping, precision. Nothing else is in here."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tandem.config import Settings
from tandem.data.loader import batch_size_of
from tandem.distributed.consensus import Agreed, AgreedReader, Telemetry
from tandem.distributed.group import ProcessGroup
from tandem.errors import NonFiniteError
from tandem.tasks.base import Task
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs, DeviceMemory, Readings
from tandem.torch_private import hidden_sync_seconds
from tandem.training.flops import buffers_kept, flops_of_pass, peak_flops
from tandem.training.nonfinite import Guard, culprit
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


class Stepper:
    """Takes optimizer steps with the model wrapped in DDP.

    `weights` inside make the gradient that of the global mean: a micro-batch of n samples weighs
    n * world_size / batch_size, whether the shares of the ranks are equal or not.
    """

    def __init__(
        self,
        world: ProcessGroup,
        settings: Settings,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self._world, self._settings, self._task, self._optimizer = world, settings, task, optimizer
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
        self._guard = Guard(settings.on_nonfinite, model, optimizer, self.scaler, world.device)
        self.grad_norm: Tensor | None = None
        self._clips = torch.zeros((), device=world.device)

    def settle_buckets(self, micro_batches: Sequence[Any], step: int, known: Costs) -> Costs:
        """Make DDP rebuild its buckets before the first real step; returns what a step costs.

        FLOPs that are `known` from the state are not counted again, on no rank: a count may hold collectives.
        Nor is the device measured again by a rank whose agent has heard of as many devices.

        At a start and at a resume alike: DDP reduces its first step in initial buckets and later ones in
        rebuilt ones; another layout sums in another order, so a resumed run would differ in its first
        step (seen from 3 ranks on).
        Gradients are thrown away, buffers are put back; the random state is set anew by each step.
        """
        with buffers_kept(self._model):
            flops = known.flops_per_sample or self._flops_per_sample(micro_batches[0])
            self._accumulate(micro_batches, step, Proposal())
            self._reset_gradients()
        self._ddp.train()  # type: ignore[no-untyped-call]
        is_told = self._world.position.restart > 0 and known.devices == self._world.size
        device_flops = 0.0 if is_told else peak_flops(self._world.device, self._settings.precision)
        self.clock.pause()
        self.clock.begin_step()
        sync_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        return Costs(flops, device_flops, self._world.size, sync_bytes)

    def _flops_per_sample(self, batch: Any) -> float:
        """The first micro-batch's, forward and backward, per sample."""

        def loss_of() -> Tensor:
            outcome = self._task.loss(self._model, batch)
            loss = outcome[0] if isinstance(outcome, tuple) else outcome
            assert isinstance(loss, Tensor)
            return loss

        return flops_of_pass(loss_of, self._parameters) / batch_size_of(batch)

    def take(self, micro_batches: Sequence[Any], step: int, proposal: Proposal) -> Agreed | None:
        """One optimizer step on this rank's micro-batches; what the ranks agreed on (see AgreedReader).

        Raises NonFiniteError, with the name of the first tensor, under `--on-nonfinite raise`.
        """
        self._guard.begin_step()
        self._accumulate(micro_batches, step, proposal)
        self.clock.enter("optimizer")
        assert self._carrier.grad is not None
        left_out = self._guard.look(self._carrier.grad)
        agreed = self._reader.read(step, self._carrier.grad, left_out)
        if self._guard.raises and left_out and not self._is_overflow():
            self._raise(micro_batches, step)
        self._guard.update(left_out, self._clip)
        self._reset_gradients()
        return agreed

    def read(self) -> Readings:
        """Everything for a line of the log; waits for the device, so not in every step."""
        clips = int(self._clips)
        self._clips.zero_()
        return Readings(
            grad_norm=float(self.grad_norm) if self.grad_norm is not None else None,
            loss_scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            clips=clips,
            hidden_sync_seconds=hidden_sync_seconds(self._ddp),
            memory=device_memory(self._world.device),
        )

    def drain(self) -> Agreed | None:
        """What the last step on a GPU agreed on."""
        return self._reader.drain()

    def _accumulate(self, micro_batches: Sequence[Any], step: int, proposal: Proposal) -> None:
        scale = self.scaler.scale(torch.ones((), device=self._world.device))  # 1 without fp16
        so_far = torch.zeros((), device=self._world.device)
        last = len(micro_batches) - 1
        for micro_step, batch in enumerate(micro_batches):
            self.clock.enter("transfer")
            weight = batch_size_of(batch) * self._world.size / self._settings.batch_size
            values = torch.tensor(
                [float(proposal.stop), float(micro_step == last), 0.0, float(proposal.decisions)]
            )
            values = values.to(self._world.device, non_blocking=True)
            seed_micro_step(self._seed, step, micro_step, self._world.rank)
            self.clock.enter("forward")
            with self._world.without_sync(self._ddp, skip=micro_step != last):
                scaled, loss, _metrics = self._ddp(values, batch, weight, scale, so_far)
                self.clock.enter_backward(scaled)
                scaled.backward()
            so_far = so_far + loss.detach()

    def _clip(self) -> None:
        if self._settings.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
            self._clips += self.grad_norm > self._settings.clip_norm

    def _is_overflow(self) -> bool:
        """Whether fp16's scaled gradients have left its range, which is how their scale is found."""
        assert self._carrier.grad is not None
        return self.scaler.is_enabled() and not self._carrier.grad[Telemetry.LOSS_NOT_FINITE] > 0

    def _raise(self, micro_batches: Sequence[Any], step: int) -> NoReturn:
        one, zero = torch.ones((), device=self._world.device), torch.zeros((), device=self._world.device)

        def forward(micro_step: int) -> Tensor:
            seed_micro_step(self._seed, step, micro_step, self._world.rank)
            loss: Tensor = self._ddp.module.module(micro_batches[micro_step], 1.0, one, zero)[1]
            return loss

        self._guard.put_buffers_back()
        name = culprit(self._world, self._model, micro_batches, forward)
        raise NonFiniteError(f"step {step + 1}: {name} is not finite")

    def _reset_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        self._carrier.grad = None if self._carrier.grad is None else self._carrier.grad.zero_()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The allocator's numbers of a GPU, None on CPUs."""
    if device.type != "cuda":
        return None
    numbers = torch.cuda.memory_stats(device)
    return DeviceMemory(
        gpu=device.index or 0,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        retries=int(numbers.get("num_alloc_retries", 0)),
        ooms=int(numbers.get("num_ooms", 0)),
    )
