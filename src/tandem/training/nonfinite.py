"""Handle non-finite losses and gradients: keep them out of the state, agree on them, count and report them.

In each step, the ranks exchange whether any loss or gradient is not finite, together with the gradients. So
all ranks decide the same, without an extra collective. See docs/architecture.md#the-telemetry-parameter.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.distributed.consensus import Consensus
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.errors import NonFiniteError
from tandem.telemetry import metrics
from tandem.telemetry.recorder import Recorder
from tandem.torch_private import can_skip_on_device, has_overflowed, note_nonfinite
from tandem.training.buffers import KeptBuffers

log = logging.getLogger("tandem.run")

# A run that skips every step looks alive but no longer learns, so it ends.
MOST_SKIPS_IN_A_ROW = 100
ADVICE = "lower --lr, set --clip-norm, or check the data"


class Guard:
    """Keep a step that is not finite out of weights, optimizer state and buffers.

    On CPUs the answer is read before the update. On GPUs the host would wait for it in every step, so a fused
    optimizer gets the answer as a tensor and skips the update on the device, as with GradScaler. The host
    waits if the optimizer cannot do that, or has no state yet: torch's fused SGD would keep a momentum buffer
    that it never initialized.
    """

    def __init__(
        self,
        policy: str,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._strategy = strategy
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._keeps_buffers = policy != "stop"  # after a stop they are not used
        self._reads_at_once = device.type == "cpu" or strategy.shards_parameters
        self._one = torch.ones((), device=device)
        self._buffers = KeptBuffers(model.modules)
        self.step: Callable[[], Any] = optimizer.step

    def begin_step(self) -> None:
        """Copy the buffers before the forward pass, because a bad batch would spoil them."""
        if self._keeps_buffers:
            self._buffers.keep()

    def look(self) -> Tensor:
        """Return a scalar on the device: 1 if a local gradient is not finite, else 0.

        Called after the last backward pass.
        """
        found = torch.zeros_like(self._one)
        for gradients in gradients_by_type(self.parameters, self._strategy):
            note_all_nonfinite(gradients, found, self._one)
        return found

    def update(self, found: Tensor, clip: Callable[[], None]) -> None:
        """Unscale, clip and step, unless `found` says that the step must be skipped."""
        if self._scaler.is_enabled():
            self._show_scaler(found)
            self._scaler.unscale_(self._optimizer)
            clip()
            # A fused optimizer without state must not see a first step that overflows: SGD would keep a
            # momentum buffer that was never written.
            if has_its_state(self._optimizer) or not has_overflowed(self._scaler, self._optimizer):
                self._scaler.step(self._optimizer)
            # This also lowers the scale after an overflow, so it is called even if the step was left out.
            self._scaler.update()
        elif self._reads_at_once or not can_skip_step(self._optimizer):
            if not found:
                clip()
                self.step()
        else:
            clip()
            # torch's fused optimizers look for the attribute that GradScaler sets. It is removed, because it
            # would also apply to later steps.
            self._optimizer.found_inf = found  # type: ignore[attr-defined]
            self._optimizer.step()
            del self._optimizer.found_inf  # type: ignore[attr-defined]
        # Nothing needs restoring if the host knows that all values are finite.
        if self._keeps_buffers and not (self._reads_at_once and not found):
            self._buffers.put_back(found)

    def _show_scaler(self, found: Tensor) -> None:
        """Make a non-finite loss visible in the gradients, which are all that GradScaler checks."""
        # One NaN is enough: GradScaler leaves out the whole step.
        for gradients in gradients_by_type(self.parameters, self._strategy):
            gradients[0].masked_fill_(found.to(gradients[0].device) > 0, math.nan)


def can_skip_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can skip a step on the device, without the host."""
    return can_skip_on_device(optimizer) and has_its_state(optimizer)


def has_its_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has all its state. SGD without momentum never has any."""
    if isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups):
        return True
    return bool(optimizer.state)


def gradients_by_type(parameters: Sequence[nn.Parameter], strategy: Strategy) -> Iterator[list[Tensor]]:
    """Yield the local gradients as real, dense tensors, grouped by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                # values() raises for a tensor that is not coalesced.
                parameter.grad = parameter.grad.coalesce()
            values = strategy.local(parameter.grad)
            values = values.values() if values.is_sparse else values
            # The kernel in `note_nonfinite` takes no complex numbers.
            values = torch.view_as_real(values) if values.is_complex() else values
            groups.setdefault((values.dtype, values.device), []).append(values)
    yield from groups.values()


def note_all_nonfinite(gradients: Sequence[Tensor], found: Tensor, one: Tensor) -> None:
    """Set the scalar `found` to 1 if any value is not finite, also on another device than `found`.

    All gradients have one device and dtype.
    """
    device = gradients[0].device
    there = found.to(device)
    if gradients[0].is_cuda:
        # A norm reads each gradient once. `note_nonfinite` also writes it, which takes a GPU twice as long;
        # on CPUs it is much faster. An empty gradient has no maximum.
        largest = nn.utils.get_total_norm([each for each in gradients if each.numel()], math.inf)
        there = torch.maximum(there, (~largest.isfinite()).to(there))
    else:
        note_nonfinite(gradients, there, one.to(device))
    if there is not found:
        found.copy_(torch.maximum(found, there.to(found.device)))


@dataclass
class Policy:
    """Decide what a skipped step means for the run. All ranks reach the same decision.

    `is_scaled`: whether a GradScaler scales the loss; it adjusts its scale by overflowing gradients.
    `culprit(step)`: a description of the first tensor that was not finite in the 0-based `step`; all ranks
    call it.
    """

    name: str
    is_scaled: Callable[[], bool]
    recorder: Recorder
    culprit: Callable[[int], str | None] = lambda step: None
    _skipped: int = 0
    _last_step: int = 0
    _in_a_row: int = 0

    def consider(self, consensus: Consensus) -> None:
        """Count a skipped step. Raises NonFiniteError if the run must end."""
        if not consensus.is_skipped:
            return
        step = consensus.step + 1
        in_loss = math.isnan(consensus.loss)
        overflow = self.is_scaled() and not in_loss
        reason = "nonfinite_loss" if in_loss else "amp_overflow" if overflow else "nonfinite_grad"
        self.recorder.samples(metrics.STEPS_SKIPPED.inc(reason=reason))
        if overflow:  # GradScaler finds its scale this way, and has just lowered it
            return
        what = f"the loss of step {step} is" if in_loss else f"the gradients of step {step} are"
        self.recorder.event("nonfinite", step=step, reason=reason, policy=self.name)
        if self.name != "skip":
            if in_loss:
                self.recorder.not_finite()
            first = self.culprit(consensus.step)
            named = f" (first: {first})" if first else ""
            raise NonFiniteError(
                f"{what} not finite{named}; {ADVICE}; checkpoints, if any, are from before this step"
            )
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._skipped = self._skipped + 1
        self._last_step = step
        if self._in_a_row >= MOST_SKIPS_IN_A_ROW:
            raise NonFiniteError(f"{what} not finite, like the {self._in_a_row - 1} before it; {ADVICE}")
        if self._skipped & (self._skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th...
            log.warning("%s not finite: skipped the update (%d so far)", what, self._skipped)


def culprit(
    world: ProcessGroup,
    strategy: Strategy,
    model: nn.Module,
    micro_batches: Sequence[Any],
    forward: Callable[[int], Tensor],
    has_gradients: bool = True,
) -> str | None:
    """Describe the first tensor that is not finite in a step; the result is the same on all ranks.

    `forward(i)` repeats micro-step i with the same randomness and returns its loss. Checks on every rank the
    batch, the weights, and then each module's output. If all of them and the loss are finite, a gradient is
    at fault; returns None if the step's gradients are gone.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    weights = ((name, strategy.local(parameter)) for name, parameter in named)
    # Backward runs from the last layer to the first, so the last parameter is closest to the origin.
    gradients = ((n, strategy.local(p.grad)) for n, p in reversed(named) if p.grad is not None)
    found = (  # every check on every rank, because a forward pass may need all ranks
        _in_batches(micro_batches),
        _in_tensors("the weight", weights),
        _in_forward(model, len(micro_batches), forward),
    )
    own_culprit = next((what for what in found if what is not None), None)
    gathered = world.gather_json([own_culprit, _in_tensors("the gradient of", gradients)])
    for rank, (what, _) in enumerate(gathered):
        if what is not None:
            return f"{what} on rank {rank}"
    if not has_gradients:
        return None
    return next((gradient for _, gradient in gathered if gradient is not None), "the loss")


def _in_batches(micro_batches: Sequence[Any]) -> str | None:
    for micro_step, batch in enumerate(micro_batches):
        if (where := _in_values("the batch", batch)) is not None:
            return where + (f" (micro-batch {micro_step})" if len(micro_batches) > 1 else "")
    return None


def _in_values(name: str, values: Any) -> str | None:
    """Return the first non-finite tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(values, Tensor):
        return None if _is_finite(values) else name
    if is_dataclass(values):
        values = {each.name: getattr(values, each.name) for each in fields(values)}
    if isinstance(values, Mapping | list | tuple):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            if (found := _in_values(f"{name}[{key!r}]", value)) is not None:
                return found
    return None


def _in_tensors(kind: str, named: Any) -> str | None:
    return next((f"{kind} {name}" for name, tensor in named if not _is_finite(tensor)), None)


def _in_forward(model: nn.Module, micro_steps: int, forward: Callable[[int], Tensor]) -> str | None:
    seen: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _inputs: Any, output: Any) -> None:
            what = f"the output of {name} ({type(module).__name__})" if name else "the model's output"
            if (found := _in_values(what, output)) is not None:
                seen.append(found)

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            losses = [forward(micro_step) for micro_step in range(micro_steps)]
    finally:
        for handle in handles:
            handle.remove()
    # A module's hook runs after the hooks of its submodules, so the first one found is closest to the cause.
    return seen[0] if seen else _in_values("the loss", torch.stack(losses).sum())


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
