"""Take one optimizer step: forward, backward, accumulation, clipping and precision, nothing else."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.slices import ComputeConfig, OptimizationConfig
from tandem.data.loader import batch_size_of
from tandem.data.seeds import seed_micro_step
from tandem.distributed.consensus import LOSS, SLOTS, Consensus, ConsensusReader, is_skipped, proposal_slots
from tandem.distributed.group import CollectiveObserver, ProcessGroup
from tandem.distributed.strategy import Strategy, waits_inside
from tandem.errors import NonFiniteError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.mistakes import Sums, at, check_batch, check_sums, kind, loss_and_sums, mistake, weight_of
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs, DeviceMemory, Readings
from tandem.telemetry.recorder import Recorder
from tandem.training.buffers import buffers_kept
from tandem.training.flops import convolves, flops_of, peak_flops
from tandem.training.nonfinite import Guard, culprit
from tandem.training.optim import Clipping, takes_closure, trained_by
from tandem.training.precision import autocast
from tandem.training.rank_checks import ReplayCheck, check_possible

SMALLEST_WEIGHT = 1e-12
"""With this minimum, a step in which nothing counts changes nothing instead of dividing by zero."""


@dataclass(frozen=True)
class Proposal:
    """This rank's contribution to a step: a stop request, and decisions as bits (see `loop.py`)."""

    stop: bool = False
    decisions: int = 0


class TrainingModule(nn.Module):
    """The task's loss as a module, so that a strategy sees forward and loss as one.

    The weight of a micro-batch of n samples is n * ranks / the step's `samples`. The mean over ranks of all
    gradients is then that of the global mean, with equal and with unequal shares. A task with a `weight`
    method defines n itself, and `samples` is a scalar on the device.
    """

    def __init__(
        self,
        task: TaskWithDefaults,
        model: nn.Module,
        device: torch.device,
        precision: str,
        ranks: int,
        batch_size: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.names: list[str] = []
        self._task = task
        self._device = device
        self._precision = precision
        self._ranks = ranks
        self.samples: float | Tensor = batch_size
        self.weighs = "weight" in task.own

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (weighted loss, numbers to sum over micro-batches and ranks).

        The numbers are that loss, then the named sums with their counts.
        """
        if batch is None:  # no sample for this rank: the exchange waits for its gradients, which are zero
            # The product with 0 keeps the graph: without a gradient for each parameter, this rank's buckets
            # would never be ready. Parts of a model may be on several GPUs, so each sum moves to the device
            # of the loss.
            totals = [
                p.sum().float().to(self._device, non_blocking=True)
                for p in self.parameters()
                if p.requires_grad
            ]
            return torch.stack(totals).sum() * 0, torch.zeros(1 + 2 * len(self.names), device=self._device)
        loss, sums = self.outcome(batch)
        n = self.weight(batch) if self.weighs else batch_size_of(batch)
        loss = loss.to(self._device, torch.float32, non_blocking=True) * (n * self._ranks / self.samples)
        return loss, torch.stack([loss.detach(), *self._flat(sums, loss.device)])

    def outcome(self, batch: Any, model: nn.Module | None = None) -> tuple[Tensor, Sums]:
        """Return the loss and sums of a batch.

        With `model`, uses it instead of the trained model, which may be compiled.
        """
        with autocast(self._device, self._precision):
            outcome = self._task.loss(model or self.model, batch)
        return loss_and_sums(self._task.loss, outcome, trains=torch.is_grad_enabled())

    def weight(self, batch: Any) -> Tensor:
        """Return the task's weight of a batch as a scalar on the device; 0 without a batch."""
        value = 0.0 if batch is None else weight_of(self._task.weight, self._task.weight(batch))
        return self._as_scalar(value, self._device)

    def _flat(self, sums: Sums, device: torch.device) -> list[Tensor]:
        """Return the sums and counts of `names`, in order; a missing or non-finite one adds nothing."""
        numbers = [number for name in self.names for number in sums.get(name, (0.0, 0.0))]
        return [self._as_scalar(number, device) for number in numbers]

    @staticmethod
    def _as_scalar(number: Tensor | float, device: torch.device) -> Tensor:
        """Return a scalar on `device` without waiting for it."""
        if isinstance(number, Tensor):
            return number.detach().to(device, torch.float32, non_blocking=True).reshape(())
        # torch.tensor would copy the number from the host, which waits for a GPU; a fill does not.
        return torch.full((), float(number), device=device)


class TrainStep:
    """Take optimizer steps with the model under its strategy."""

    def __init__(
        self,
        world: ProcessGroup,
        strategy: Strategy,
        compute: ComputeConfig,
        optimization: OptimizationConfig,
        batch_size: int,
        seed: int,
        task: TaskWithDefaults,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self._task = task
        self._world = world
        self._strategy = strategy
        self._optimizer = optimizer
        self._model = model
        self._precision = compute.precision
        self._seed = seed
        self._parameters = trained_by(task, model)
        # Only the training module runs the compiled model, whose names begin with `_orig_mod.`: checkpoints
        # must not have that prefix.
        trained = strategy.compiled(model, compute.compile) if compute.compile else model
        # The other two modes, reduce-overhead and max-autotune, use CUDA graphs.
        self._has_graphs = compute.compile not in (None, "default")
        self._module = TrainingModule(task, trained, world.device, compute.precision, world.size, batch_size)
        self._reader = ConsensusReader(world, self._module.names)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=compute.precision == "fp16")
        self._guard = Guard(optimization.on_nonfinite, strategy, model, optimizer, self.scaler, world.device)
        # With freeze(), a parameter that requires no gradient now may be trained in a later epoch.
        self._guard.parameters = self._parameters
        delay = 1 if world.device.type == "cuda" else 0  # for the result of the ranks' exchange
        # Only a run that stops looks for the culprit, so other runs keep no batches in memory.
        kept = 1 + delay if optimization.on_nonfinite == "stop" else 0
        self._recent: deque[tuple[int, Sequence[Any]]] = deque(maxlen=kept)
        self._clipping = Clipping(optimization, strategy, self._parameters, world)
        self._needs_closure = takes_closure(optimizer, must=True)
        self._has_stepped = False
        if self._needs_closure:
            check_closure(task, optimizer, strategy, self.scaler)
        self.samples_of: Callable[[int], int] = lambda step: batch_size  # samples of all ranks in a step
        self.may_miss_ranks = False
        """Whether some rank may have no sample in a step, and then not call the loss."""
        self.is_restarted = False
        """Whether an agent has restarted this rank, and so may know the peak of its device."""
        self.replay: ReplayCheck | None = None
        self.drops_gradients = False
        """Whether old gradients are dropped instead of zeroed.

        On a GPU this saves a kernel per gradient. It is also needed if a step may leave parameters out,
        because an optimizer skips a parameter without a gradient.
        """

    def freeze(self, epoch: int) -> bool:
        """Let the task freeze parameters for this epoch; return whether the trained ones have changed."""
        before = [p.requires_grad for p in self._parameters]
        self._task.freeze(self._model, epoch)
        changed = before != [p.requires_grad for p in self._parameters]
        if changed:  # an optimizer with weight decay or momentum acts on a gradient of zero, too
            self._optimizer.zero_grad(set_to_none=True)
        return changed

    def repeat_on_others(self, compute: ComputeConfig, recorder: Recorder) -> ReplayCheck:
        """Check each later step before which the result's `check_next_step` was called.

        Raises ConfigError if the check cannot be right.
        """
        check_possible(compute, self._world, self._strategy, self._model, self.may_miss_ranks)
        self.replay = ReplayCheck(
            self._world, self._module, self._model, self._optimizer, self._seed, recorder
        )
        return self.replay

    def take_dry_step(self, micro_batches: Sequence[Any], step: int, known: Costs) -> Costs:
        """Wrap the model and take one step that changes nothing, before the first real one; return its costs.

        This is repeated whenever the set of trained parameters changes.

        DDP reduces the gradients of its first step in initial buckets, and later ones in rebuilt buckets.
        Other buckets sum in another order, so without this step a resumed run would differ in its first step
        (observed with 3 or more ranks). The gradients are discarded and the buffers restored; each step sets
        the random state itself.

        FLOPs that are `known` from the state are not counted again on any rank, because counting may run
        collectives. The device's peak is not measured again if the agent already knows it for the same
        number of devices.
        """
        self._task.moment.step = step
        with buffers_kept(self._model):  # DDP must see the buffers from before the first forward pass
            if micro_batches[0] is not None:
                check_batch(self._task.collate, self._task.build_datasets, micro_batches[0])
            self._check_collectives(micro_batches[0])
            flops = known.flops_per_sample
            names = known.sums
            if not flops or names is None:
                flops, names = self._count(micro_batches[0])
        # The list is changed in place, because the ConsensusReader has the same one.
        self._module.names[:] = names
        with buffers_kept(self._model):
            self._strategy.wrap(self._module, SLOTS + 2 * len(names))
            self.clock.computes_alone = not waits_inside(self._strategy, self._model)
            self._accumulate(micro_batches, step, Proposal())
            with at(self._task.loss):
                self._strategy.check_gradients()
        self._module.train()
        is_told = self.is_restarted and known.devices == self._world.size
        device_flops = 0.0
        if not is_told:
            device_flops = peak_flops(self._world.device, self._precision, convolves(self._model))
        # The time of this dry step, including compilation, does not belong to the first real step.
        self.clock.pause()
        self.clock.begin_step()
        sync_bytes = self._strategy.sync_bytes([p for p in self._parameters if p.requires_grad])
        return Costs(flops, device_flops, self._world.size, sync_bytes, names)

    def _check_collectives(self, batch: Any) -> None:
        """Raise ConfigError if the loss calls collectives that do not work with unequal shares."""
        sizes = self._world.gather(0 if batch is None else batch_size_of(batch))
        misses = self.may_miss_ranks or 0 in sizes
        # A rank without a batch runs nothing. The others then raise without an exchange.
        if (len(set(sizes)) == 1 and not misses) or batch is None or self._strategy.shards_parameters:
            return

        def meet(name: str, shapes: list[list[int]]) -> None:
            if misses:
                advice = "return parts of equal lengths from of_rank(), or compute the loss without it"
                raise mistake(self._task.loss, f"{name}, which some ranks will not call", advice, "calls")
            if any(each != shapes for each in self._world.gather_json(shapes)):
                got = f"{name} with different shapes, because ranks have {sizes} samples of a batch"
                advice = f"choose a --batch-size that divides evenly over {len(sizes)} ranks"
                raise mistake(self._task.loss, got, advice, "calls")

        with torch.no_grad(), CollectiveObserver(meet):
            self._module.outcome(batch, self._model)

    def _count(self, batch: Any) -> tuple[float, tuple[str, ...]]:
        """Return the FLOPs per sample of the first micro-batch, forward and backward, and the sums' names."""
        names: list[str] = []
        # Some ranks have no batch, so they need the names from others.
        if any(self._world.gather(int(batch is None))):
            counted = None if batch is None else self._flops(batch, names)
            known: list[Any] = self._world.gather_json([counted, names])
            return next((flops, tuple(each)) for flops, each in known if flops is not None)
        return self._flops(batch, names), tuple(names)

    def _flops(self, batch: Any, names: list[str]) -> float:
        def loss_and_gradients() -> None:
            # FlopCounterMode is a dispatch mode, which sees no operations inside compiled kernels.
            loss, sums = self._module.outcome(batch, self._model)
            check_sums(self._task.loss, sums)
            names.extend(sums)
            self._strategy.gradients(loss, [p for p in self._parameters if p.requires_grad])

        return flops_of(loss_and_gradients) / batch_size_of(batch)

    def take(self, micro_batches: Sequence[Any], step: int, proposal: Proposal) -> Consensus | None:
        """Take one optimizer step on this rank's micro-batches; return the newest consensus of the ranks.

        On GPUs, it is that of an earlier step (see `ConsensusReader`). Raises NonFiniteError if an
        optimizer's closure returns a non-finite value.
        """
        self._task.moment.step = step
        self._recent.append((step, micro_batches))
        self._guard.begin_step()
        self._clipping.begin_step()
        replay = self.replay if self.replay is not None and self.replay.is_due else None
        self._accumulate(micro_batches, step, proposal, replay)
        if replay is not None:
            self.clock.enter("forward")
            replay.compare(step, micro_batches[0], self._scale())
        self.clock.enter("optimizer")
        exchanged = self._strategy.exchange(self._guard.look())
        consensus = self._reader.read(step, exchanged)
        skip = is_skipped(exchanged)
        # The guard makes this call, because it may skip the step. A closure needs the batches of this step.
        self._guard.step = partial(self._step, micro_batches, step)
        self._guard.update(skip, self._clipping.clip)
        return consensus

    def _step(self, micro_batches: Sequence[Any], step: int) -> None:
        """Call the optimizer's step, with a closure if it needs one; for some, only an error shows that."""
        if not self._needs_closure:
            try:
                self._optimizer.step()
            # A signature with an optional closure does not show whether the optimizer works without one. If
            # not, its first step fails; later errors have another cause.
            except Exception:
                if self._has_stepped or not takes_closure(self._optimizer, must=False):
                    raise
                check_closure(self._task, self._optimizer, self._strategy, self.scaler)
                self._needs_closure = True
        if self._needs_closure:
            again = partial(self._again, micro_batches, step)
            self._optimizer.step(again)  # type: ignore[arg-type]
        self._has_stepped = True

    def _again(self, micro_batches: Sequence[Any], step: int) -> Tensor:
        """Compute gradients of the same batch with the current weights; return the mean loss of all ranks.

        Raises NonFiniteError, because changes that the optimizer has made in this step cannot be undone.
        """
        # The step's decisions have been exchanged already, so the proposal is empty.
        self._accumulate(micro_batches, step, Proposal())
        exchanged = self._strategy.exchange(self._guard.look())
        if is_skipped(exchanged):
            name = type(self._optimizer).__name__
            raise NonFiniteError(
                f"step {step + 1}: the closure of {name} returned a value that is not finite; lower its lr"
            )
        self._clipping.clip()
        self.clock.enter("optimizer")
        return exchanged[LOSS]

    def read(self) -> Readings:
        """Return everything for a log line. Waits for the device, so it is not called in every step."""
        return Readings(
            grad_norm=self._clipping.norm(),
            loss_scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            clips=self._clipping.count(),
            hidden_sync_seconds=self._strategy.hidden_sync_seconds(),
            memory=device_memory(self._world.device),
        )

    def drain(self) -> Consensus | None:
        """Return the consensus of the last step, which on a GPU was not read yet."""
        return self._reader.drain()

    def _accumulate(
        self, micro_batches: Sequence[Any], step: int, proposal: Proposal, replay: ReplayCheck | None = None
    ) -> None:
        device = self._world.device
        # Drop gradients here, not after the previous step, so that they can be inspected until now. With
        # several micro-batches, DDP's are kept: new gradients of the first one would not be in DDP's buckets,
        # which costs another copy of all of them.
        keeps = self._strategy.has_buckets and len(micro_batches) > 1
        self._optimizer.zero_grad(set_to_none=self.drops_gradients and not keeps)
        self._strategy.reset()
        self._module.samples = self.samples_of(step)
        if self._module.weighs:  # exchanges one more number before the first backward pass
            weight = torch.stack([self._module.weight(batch) for batch in micro_batches]).sum()
            self._module.samples = (self._world.mean(weight) * self._world.size).clamp(min=SMALLEST_WEIGHT)
        # The scale is a separate factor, because only the loss is scaled, not the values that travel with it.
        # See docs/architecture.md#the-telemetry-parameter.
        scale = self._scale()
        so_far = torch.zeros(1 + 2 * len(self._module.names), device=device)
        last = len(micro_batches) - 1
        for micro_step, batch in enumerate(micro_batches):
            self.clock.enter("transfer")
            slots = proposal_slots(proposal.stop, proposal.decisions).to(device, non_blocking=True)
            # The seed depends on the position alone, so a resumed step and `culprit` repeat the same dropout.
            seed_micro_step(self._seed, step, micro_step, self._world.rank)
            self.clock.enter("forward")
            if self._has_graphs:  # CUDA graphs may overwrite the previous output
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with (
                replay.recording() if replay is not None and micro_step == 0 else nullcontext(),
                self._strategy.micro_step(is_last=micro_step == last),
            ):
                scaled, numbers = self._strategy.forward(slots, batch, scale, so_far)
                self.clock.enter_backward(scaled)
                scaled.backward()  # type: ignore[no-untyped-call]
            so_far = so_far + numbers

    def _scale(self) -> Tensor:
        """Return fp16's loss scale as a scalar on the device; 1 without fp16."""
        return self.scaler.scale(torch.ones((), device=self._world.device))

    def culprit(self, step: int) -> str | None:
        """Describe the first tensor that was not finite in `step`, a recent one. All ranks call this."""
        batches = next((kept for number, kept in self._recent if number == step), ())
        micro_batches = [batch for batch in batches if batch is not None]

        def forward(micro_step: int) -> Tensor:
            seed_micro_step(self._seed, step, micro_step, self._world.rank)
            return self._module.outcome(micro_batches[micro_step])[0]

        # The gradients in memory are those of the newest step.
        is_last = self._recent[-1][0] == step
        return culprit(self._world, self._strategy, self._model, micro_batches, forward, is_last)


def check_closure(
    task: TaskWithDefaults, optimizer: torch.optim.Optimizer, strategy: Strategy, scaler: torch.amp.GradScaler
) -> None:
    """Raise ConfigError for settings that do not work with an optimizer whose step takes a closure."""
    got = f"{kind(optimizer)}, whose step takes a closure"
    if scaler.is_enabled():
        raise mistake(
            task.build_optimizer, got, "torch cannot scale gradients there: use --precision bf16 or fp32"
        )
    if strategy.shards_parameters:
        raise mistake(task.build_optimizer, got, "it needs whole parameters: use --strategy ddp")


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the allocator's numbers of a GPU, or None on CPUs."""
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
