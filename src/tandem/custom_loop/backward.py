"""Run a step's backward passes, exchange their results between ranks, and keep out non-finite values.

docs/architecture.md#the-telemetry-parameter describes the exchange.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tandem.custom_loop.kept import unwrapped
from tandem.custom_loop.limits import AveragedParameters, PlainBackward
from tandem.distributed.consensus import (
    LOSS,
    LOSS_NOT_FINITE,
    SLOTS,
    ConsensusReader,
    is_skipped,
    pack,
    proposal_slots,
)
from tandem.distributed.group import ProcessGroup
from tandem.distributed.replica import PiggybackedValues, Replica
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Consensus, Readings
from tandem.telemetry.recorder import Recorder
from tandem.torch_private import hidden_sync_seconds
from tandem.training.buffers import KeptBuffers
from tandem.training.nonfinite import can_skip_step, gradients_by_type, note_all_nonfinite
from tandem.training.step import device_memory

# Collect the numbers that a script logs: summed on the device, and over ranks when a log line is due.
#
# Ranks must sum the same names. A rank with a new name reports that in the step's exchange, and at the next
# line all ranks exchange their names. No collective is needed until names differ.


class LoggedValues:
    """{name: (sum, count)} of this rank since the last line."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sums: dict[str, tuple[Any, int]] = {}
        self._agreed_names: list[str] = []
        self.has_new = False
        self.must_agree_on_names = True
        """True before the first line, and once all ranks know that some rank had a new name."""

    def add(self, name: str, value: Any) -> None:
        """Add a value. Never waits for the device.

        Raises ConfigError if it is not a single real number.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ConfigError(
                    f"run.log({name}=...): invalid {'complex ' * value.is_complex()}tensor of shape "
                    f"{tuple(value.shape)}; expected one number"
                )
            value = value.detach().float().reshape(())
            value = value if value.is_cuda else float(value)
        else:
            value = _real(name, value)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)
        self.has_new = self.has_new or name not in self._agreed_names

    def state(self) -> list[str]:
        """Return the settled names, for a checkpoint."""
        return self._agreed_names

    def load(self, names: list[str]) -> None:
        self._agreed_names = list(names)
        self.must_agree_on_names = not names

    def reduced(self) -> dict[str, tuple[float, float]]:
        """Return the sums and counts of all ranks, and reset them. All ranks call this at the same step."""
        if self.must_agree_on_names:
            known = self._group.gather_json(sorted({*self._agreed_names, *self._sums}))
            self._agreed_names = sorted({name for names in known for name in names})
            self.has_new = self.must_agree_on_names = False
        if not self._agreed_names:
            return {}
        local_sums = [self._sums.pop(name, (0.0, 0)) for name in self._agreed_names]
        pairs = [(float(total), float(count)) for total, count in local_sums]
        # One non-finite value would hide the mean of all others.
        finite = [pair if abs(pair[0]) < float("inf") else (0.0, 0.0) for pair in pairs]
        totals = self._group.sum([number for pair in finite for number in pair])
        return dict(zip(self._agreed_names, zip(totals[::2], totals[1::2], strict=True), strict=True))


def _real(name: str, value: Any) -> float:
    """Convert anything that is one number: Python's, NumPy's, a Decimal, an array of one element."""
    is_array_of_one = getattr(value, "size", 1) == 1
    try:
        if not is_array_of_one or not hasattr(type(value), "__float__"):
            raise TypeError
        return float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"run.log({name}=...): invalid type {type(value).__name__}; expected a number, "
            "or a tensor or array of one"
        ) from error


ASKED = "asked"
"""A pair next to the fixed slots: how many ranks have new names for the log, and want to end the run."""
LOOKS_AT = 2
"""Steps of a process that are checked for a second backward pass without an optimizer step."""


class Backward:
    """Run the script's backward passes, and return the consensus after each step."""

    def __init__(self, group: ProcessGroup, strategy: Strategy, clock: Clock, policy: str) -> None:
        self._group = group
        self._strategy = strategy
        self._clock = clock
        self._policy = policy
        self._broken = (-1, "")  # the last step with a non-finite value, and the first such tensor
        self.piggybacked = PiggybackedValues(torch.zeros(SLOTS + 2, device=group.device))
        self.models: list[nn.Module] = []
        self.numbers = LoggedValues(group)
        self.recorder: Recorder | None = None
        self.wants_end = self.ends = False
        self._reader = ConsensusReader(group, (ASKED,))
        self._one = torch.ones((), device=group.device)
        self._plain = PlainBackward()
        self._averaged = AveragedParameters()
        self._exchanged: Tensor | None = None
        self._found: Tensor | None = None
        self._buffers = KeptBuffers(
            lambda: (module for model in self.models for module in unwrapped(model).modules())
        )
        self._steps = 0
        self._step = 0
        self._flushed_at = -1
        self._unused = set[int]()
        self._is_in_parts = False
        self._has_stepped = False
        """Whether an optimizer has stepped since the last backward pass."""
        self._optimized = set[int]()
        """IDs of parameters of optimizers that have stepped; others keep their gradients, as with DDP."""
        self._is_stepping = False
        self._scaled: tuple[Tensor, Tensor, Tensor] | None = None
        """(result, input, scale) of the GradScaler's last call."""
        self.is_scaled = False
        """Whether the last loss was scaled. The GradScaler then checks the gradients."""
        self.watch_optimizers()

    def watch(self, model: nn.Module) -> None:
        """Include the gradients of one more wrapped model."""
        self.models.append(model)
        self._plain.watch(model)
        self.watch_frozen(model)

    def watch_frozen(self, model: nn.Module) -> None:
        """Check that no parameter of `model` is trained unless ranks average its gradient."""
        # With one rank, there is nothing to average.
        if self._group.size > 1:
            self._averaged.watch(model)

    def set_gradient_sync(self, is_last: bool) -> None:
        """Set whether the next forward and backward pass is the last of its batch.

        In the last one, ranks exchange gradients.
        """
        for model in self.models:
            if isinstance(model, Replica):
                model.set_gradient_sync(is_last)

    def watch_optimizers(self) -> None:
        """Keep optimizers from using non-finite gradients; the script may still read them."""
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)

    def watch_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Report losses that `scaler` has scaled without the scale, and leave overflows to it."""
        scale = scaler.scale

        def scaled(outputs: Any) -> Any:
            made = scale(outputs)
            if isinstance(outputs, Tensor) and scaler.is_enabled():
                self._scaled = made, outputs.detach(), scale(torch.ones((), device=outputs.device))
            return made

        scaler.scale = scaled  # type: ignore[method-assign]

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Skip the step if a value was not finite; on GPUs, decide that on the device.

        The host does not know the result there yet, and does not wait for it. Raises ConfigError for
        gradients that did not come from `run`, and for those that ranks do not average.
        """
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._plain.before_optimizer(trained)
        self._averaged.check(trained)
        self._is_stepping = True
        if self._found is None or hasattr(optimizer, "found_inf"):  # a GradScaler decides
            return
        # torch's fused optimizers read `found_inf` on the device, where a GradScaler sets it.
        if self._found.is_cuda and can_skip_step(optimizer):
            optimizer.found_inf = self._found  # type: ignore[attr-defined]
        elif bool(self._found):
            self._drop_gradients()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._is_stepping = False
        used = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._unused -= used
        self._optimized |= used
        self._has_stepped = True
        # The next step would take it for a GradScaler's.
        if getattr(optimizer, "found_inf", None) is self._found and self._found is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def begin_step(self, step: int, stop: bool, decisions: int) -> None:
        """Prepare this rank's part of the step's exchange, before the script gets its batch."""
        self._step = step
        self._exchanged = None
        self._found = None
        self._slots = proposal_slots(stop, decisions).to(self._group.device, non_blocking=True)
        self._so_far = torch.zeros((), device=self._group.device)
        # A forward pass updates running statistics, and a skipped step must not change them.
        if self._policy == "skip":
            self._buffers.keep()

    def run(self, loss: Tensor, weight: float, is_last: bool) -> None:
        """Run backward from `loss` times `weight`; exchange gradients and the step's numbers if `is_last`.

        Raises ConfigError for gradients left from an earlier step.
        """
        # This check copies gradients and waits for the GPU. A missing optimizer.step() already shows in the
        # second step.
        looks = self._steps < LOOKS_AT and not self._is_in_parts
        before = self._first_gradients() if looks else []
        self._is_in_parts = not is_last
        value = self._unscaled(loss).float().reshape(())
        self._so_far = self._so_far + value * weight
        numbers = self._packed() if is_last else torch.zeros_like(self.piggybacked.numbers)
        replicas = [model for model in self.models if isinstance(model, Replica)]
        for replica in replicas:
            replica.begin_backward()
        self.piggybacked.numbers = numbers
        self._clock.enter_backward(loss)
        # Through this factor, a non-finite loss makes all gradients non-finite, so every rank sees it in the
        # exchanged gradients.
        gradient = (value * 0 + weight).to(loss.dtype).reshape(loss.shape)
        self._plain.is_ours = True
        try:
            loss.backward(gradient=gradient)  # type: ignore[no-untyped-call]
        finally:
            self._plain.is_ours = False
        self._clock.enter("optimizer")
        self._look_for_a_missing_step(before)
        if not is_last:
            return
        arrived = next((means for each in replicas if (means := each.arrived()) is not None), None)
        # If no wrapped model took part in this pass, for example in a single process, use one small
        # all-reduce.
        self._take(self._group.mean(numbers) if arrived is None else arrived)

    def _packed(self) -> Tensor:
        asked = torch.tensor([float(self.numbers.has_new), float(self.wants_end)])
        asked = asked.to(
            self._group.device, non_blocking=True
        )  # a tensor created on the device would make the host wait
        return pack(self._slots, torch.cat([self._so_far.reshape(1), asked]))

    def _take(self, means: Tensor) -> None:
        found = torch.zeros_like(self._one)
        for gradients in gradients_by_type(self._parameters(), self._strategy):
            note_all_nonfinite(gradients, found, self._one)
        exchanged = torch.cat([means, found.reshape(1)])
        self._refuse(exchanged)
        if self._exchanged is not None:  # an earlier backward pass of this step did, and its loss is reported
            # A flag from either pass counts.
            loss = self._exchanged[LOSS]
            exchanged = torch.maximum(self._exchanged, exchanged)
            exchanged[LOSS] = loss
        self._exchanged = exchanged

    def _refuse(self, exchanged: Tensor) -> None:
        """Keep optimizers from stepping if the loss or gradients are not finite.

        On CPUs, the result is known now.
        """
        skip = is_skipped(exchanged)
        if self._policy == "stop" and not self.is_scaled and not skip.is_cuda and bool(skip):
            self._broken = self._step, self._first_nonfinite(exchanged)
        leaves_out = not self.is_scaled and (skip.is_cuda or bool(skip))
        self._found = skip if leaves_out else None
        if leaves_out and self._is_stepping and bool(skip):
            self._drop_gradients()  # in a closure, whose optimizer reads them next
        if self._policy == "skip":
            self._buffers.put_back(skip)

    def _unscaled(self, loss: Tensor) -> Tensor:
        """Return the loss before a GradScaler scaled it, even if the scaled loss has overflowed."""
        scaled = self._scaled
        self._scaled = None
        self.is_scaled = scaled is not None
        if scaled is None:
            return loss.detach()
        made, before, scale = scaled
        # The script may have changed the scaled loss, for example divided it by a number of parts. Divide by
        # the scale, unless that has overflowed.
        if made is loss:
            return before
        return torch.where(torch.isfinite(loss.detach()), loss.detach() / scale, before)

    def culprit(self, step: int) -> str | None:
        """Return the name of the first non-finite tensor in `step`.

        Returns None on GPUs, where nothing waits for it.
        """
        broken_at, name = self._broken
        return name if broken_at == step else None

    def _first_nonfinite(self, exchanged: Tensor) -> str:
        if exchanged[LOSS_NOT_FINITE] > 0:
            return "the loss"
        # A backward pass begins at the last layer, so the last parameters got their gradients first.
        named = [pair for model in self.models for pair in reversed([*model.named_parameters()])]
        broken = (n for n, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all()))
        return f"the gradient of {next(broken, 'a parameter')}"

    def end_step(self) -> Consensus | None:
        """Return the consensus of the step; on GPUs, of the previous step."""
        had_backward = self._exchanged is not None
        if self._exchanged is None:  # no backward pass: the script has skipped this batch
            means = self._group.mean(self._packed())
            means[LOSS] = torch.nan
            self._exchanged = torch.cat([means, torch.zeros_like(means[:1])])
        self._steps += 1
        self._plain.end_step(self._step, had_backward, self._steps)
        return self._record_agreement(self._reader.read(self._step, self._exchanged))

    def drain(self) -> Consensus | None:
        """Return the consensus of the last step, which on a GPU was not read yet."""
        return self._record_agreement(self._reader.drain())

    def read(self) -> Readings:
        """Return everything for a log line, and pass the script's own numbers to the recorder."""
        self.flush()
        hidden = max((hidden_sync_seconds(m) for m in self.models if isinstance(m, Replica)), default=0.0)
        return Readings(None, None, 0, hidden, device_memory(self._group.device))

    def flush(self) -> None:
        """Add the numbers of this and earlier steps to the open log interval, on all ranks."""
        if self._flushed_at != self._step and self.recorder is not None:
            self._flushed_at = self._step
            self.recorder.logged(self.numbers.reduced())

    def _record_agreement(self, agreed: Consensus | None) -> Consensus | None:
        if agreed is None:
            return None
        new_names, ends = agreed.sums.pop(ASKED)  # type: ignore[attr-defined]
        self.numbers.must_agree_on_names = self.numbers.must_agree_on_names or new_names > 0
        self.ends = self.ends or ends > 0
        return agreed

    def _parameters(self) -> Sequence[nn.Parameter]:
        return [p for model in self.models for p in model.parameters() if p.grad is not None]

    def _drop_gradients(self) -> None:
        """Remove all gradients: an optimizer then skips the parameters, with momentum and weight decay."""
        for parameter in self._parameters():
            parameter.grad = None

    def _first_gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Return the first trainable parameter of each model, with a copy of its gradient."""
        # A loop may freeze a whole model for one of its passes.
        first = [next((p for p in model.parameters() if p.requires_grad), None) for model in self.models]
        return [(p, None if p.grad is None else p.grad.clone()) for p in first if p is not None]

    def _look_for_a_missing_step(self, before: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Raise ConfigError if a backward pass has added to gradients that no optimizer has used yet."""
        for parameter, gradient in before:
            if parameter.grad is None or (gradient is not None and torch.equal(parameter.grad, gradient)):
                continue
            is_due = id(parameter) in self._optimized or not self._has_stepped
            if is_due and id(parameter) in self._unused and gradient is not None and bool(gradient.any()):
                raise ConfigError(
                    "run.backward added to gradients of an earlier backward: call optimizer.step() and "
                    "optimizer.zero_grad() between them; parts of a batch are added up by run.parts(batch, N)"
                )
            self._unused.add(id(parameter))
        self._has_stepped = False
