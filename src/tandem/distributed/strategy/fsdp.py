"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state are sharded over the ranks.

A parameter is a DTensor, sharded along its first dimension; full parameters exist only during computation.
Each block of an nn.ModuleList is gathered separately, and everything else together. It runs on GPUs and, with
gloo, on CPUs.
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tandem.checkpoint.sharded import SHARD, VALUES, mapped_shards, shard
from tandem.distributed.deferred_values import DeferredValues, ModuleTensor, build_deferred
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError
from tandem.text import in_one_line
from tandem.torch_private import FakeTensors

log = logging.getLogger("tandem.run")

ROWS = (Shard(0),)
"""The placements of a tensor whose rows are sharded."""


class FSDPStrategy(Strategy):
    """Every rank holds its shard and processes its part of the batch."""

    shards_parameters = True
    shards_state = True
    has_one_device = True
    _compiles: Sequence[nn.Module] = ()
    _values: DeferredValues | None = None

    @staticmethod
    def warm_up() -> None:
        """Build a model in advance, because the first fake tensor makes torch import modules for a second."""
        with suppress(Exception):  # a rank will then build the whole model, and say why
            build_deferred(FakeTensors(), lambda: nn.Linear(1, 1))

    def check(self, group: ProcessGroup) -> None:
        """Accept any number of ranks. Raises ConfigError on CPUs if torch supports only GPUs (2.6)."""
        if group.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise ConfigError(
                f"--strategy fsdp on CPUs needs torch 2.11 to 2.15, found {torch.__version__}; install one "
                "of those, or use --strategy ddp"
            )

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the model without values, so that no rank has all of them; with them if that is impossible.

        All ranks do the same.
        """
        deferred: tuple[nn.Module, DeferredValues] | None = None
        states = random.getstate(), numpy.random.get_state()
        problem = digest = ""
        try:
            deferred = build_deferred(FakeTensors(), make)
            digest = deferred[1].digest(deferred[0])
        # Building the whole model raises the task's own error again.
        except Exception as error:
            problem = in_one_line(error)
        told = self._group.gather_json([problem, digest])
        if deferred is not None and all(each == told[0] for each in told):
            model, self._values = deferred
            return model
        if self._group.is_first:
            log.info("--strategy fsdp: each rank builds the whole model, because %s", _reason(told))
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        return make()

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard the model; as with DDP, rank 0's values are used."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if not tensor.is_meta:
                    dist.broadcast(tensor, src=0)
        tensors = self._values.module_tensors(model) if self._values else []
        self._mesh = mesh = DeviceMesh(self._group.device.type, torch.arange(self._group.size))
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._blocks = [block for blocks in lists for block in blocks]
        # The order matters: the root takes the parameters that no block has taken.
        for block in self._blocks:
            fully_shard(block, mesh=mesh)
        self._root: FSDPModule = fully_shard(model, mesh=mesh)
        if self._values:
            self._compute(self._values, model, tensors)
        self._values = None
        self._buffers = [*model.buffers()] if has_buffers_beside_batchnorm(model) else []
        model.register_forward_hook(_reshard_in_evaluation)
        return model

    def _compute(self, values: DeferredValues, model: nn.Module, tensors: list[ModuleTensor]) -> None:
        """Give the sharded model its values: rank 0 computes one tensor after another and sends it."""
        device = self._group.device
        model._apply(partial(_allocated, device))  # type: ignore[no-untyped-call]
        held: dict[int, list[ModuleTensor]] = {}
        for each in tensors:
            held.setdefault(id(each.tensor), []).append(each)
        for key, computed in values.computed(self._group.is_first):
            form = held[key][0].tensor
            whole = torch.empty_like(form, device=device) if computed is None else computed.to(device)
            whole = whole.contiguous()
            dist.broadcast(whole, src=0)
            self._set(held[key], whole)
        state = torch.default_generator.get_state().to(device)
        dist.broadcast(state, src=0)  # as if this rank had drawn the numbers, too
        torch.default_generator.set_state(state.cpu())

    def _set(self, tensors: Sequence[ModuleTensor], whole: Tensor) -> None:
        """Put values where the model holds them: this rank's rows of a parameter, all of anything else."""
        attribute = None
        for module, name, _, _ in tensors:
            there = getattr(module, name)
            if isinstance(there, DTensor):
                first, length = self.rows(len(whole))
                with torch.no_grad():
                    there.to_local().copy_(whole[first : first + length])
            else:
                # A copy, because `whole` may be a view of memory that is needed for other tensors.
                attribute = whole.clone() if attribute is None else attribute
                setattr(module, name, attribute)

    def compiled(self, model: nn.Module, mode: str) -> nn.Module:
        """Make the model's blocks use compiled forwards while gradients are recorded; return the model.

        The hooks that gather and reshard are not compiled, because torch.compile gives up at them (torch
        2.15: not a single graph was left). Raises ConfigError for CUDA graphs, because parameters are
        gathered at a different address each time.
        """
        if mode != "default":
            raise ConfigError(
                f"--compile {mode} does not work with --strategy fsdp; use default, or --strategy ddp"
            )
        self._compiles = self._blocks or [model]
        return model

    def wrap(self, module: nn.Module, slots: int) -> None:
        for block in self._compiles:  # not earlier: FLOPs are counted on modules that are not compiled
            block.forward = compiled_in_training(block.forward)
        self._compiles = []
        super().wrap(module, slots)

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        self._root.set_requires_gradient_sync(is_last)
        return nullcontext()

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        # fully_shard does not exchange buffers, so broadcast them before each forward pass, as DDP does.
        for buffer in self._buffers:
            dist.broadcast(buffer, src=0)
        return super().forward(slots, batch, scale, so_far)

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        slots = super().exchange(gradients_not_finite)
        # The mean is computed here, because gloo has no average.
        dist.all_reduce(slots)
        return slots / self._group.size

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return _everywhere(super().norm(parameters))

    def clip(self, parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
        return _everywhere(super().clip(parameters, largest))

    def gradients(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        # The forward pass uses the gathered parameters. autograd.grad would find no path to the sharded ones.
        loss.backward()  # type: ignore[no-untyped-call]

    def gather_full(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather one tensor at a time, so that no GPU holds more than one full tensor."""
        whole: dict[str, Any] = _gathered(state, self._group.is_first)
        return whole

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():  # to_local() is cheaper then
            local: dict[str, Any] = self._local(state)
        return local

    def _local(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            if value.placements != ROWS:  # some optimizers' statistics, which are small
                return value.full_tensor()
            local = value.to_local()
            shape = value.shape
            return shard(shape, self.rows(shape[0])[0], local.detach() if local.requires_grad else local)
        if isinstance(value, dict):
            return {key: self._local(item) for key, item in value.items()}
        return [self._local(item) for item in value] if isinstance(value, list) else value

    def with_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            **state,
            **{part: mapped_shards(state[part], self._sharded) for part in ("model", "optimizer")},
        }

    def _sharded(self, _path: object, part: dict[str, Any]) -> DTensor:
        shape = torch.Size(part[SHARD][0])
        local = part[VALUES].to(self._group.device)
        stride = torch.empty(shape, device="meta").stride()
        # from_local would assume that all ranks have as many rows as this one.
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def rows(self, length: int) -> tuple[int, int]:
        most = -(-length // self._group.size)  # as torch.chunk: the last ranks may have fewer rows, or none
        first = min(self._group.rank * most, length)
        return first, min(most, length - first)

    def load_model(self, model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
        sharded = model.state_dict()
        super().load_model(model, {n: _share(v, sharded.get(n)) for n, v in state.items()}, strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shares = {
            index: {name: _share(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        super().load_optimizer(optimizer, {**state, "state": shares})


def _allocated(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _reason(told: Sequence[Sequence[str]]) -> str:
    """Return why every rank must build the whole model, from each rank's [problem, digest]; "" if none."""
    problems = (f"{problem} (rank {rank})" for rank, (problem, _) in enumerate(told) if problem)
    return next(problems, "the ranks build different models")


def compiled_in_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Use the compiled forward only with gradients, because evaluations have other shapes."""
    compiled = torch.compile(forward)

    @wraps(forward)
    def either(*arguments: Any, **options: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*arguments, **options)

    return either


def _reshard_in_evaluation(module: nn.Module, _inputs: Any, _output: Any) -> None:
    """Reshard the root after a forward in evaluation, because no backward follows to do it."""
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        module.reshard()


def _everywhere(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _gathered(value: Any, keep: bool) -> Any:
    """Return dicts and lists with every DTensor gathered to a full CPU tensor, or to None unless `keep`."""
    if isinstance(value, DTensor):
        whole = value.full_tensor()  # all ranks get here in the same order
        return whole.cpu() if keep else None
    if isinstance(value, dict):
        return {key: _gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered(item, keep) for item in value]
    return value


def _share(value: Any, like: Tensor | None) -> Any:
    """Return this rank's shard of a full tensor, if `like` is sharded."""
    # An optimizer's state also has scalars, such as Adam's step, which are not sharded.
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if is_whole and isinstance(like, DTensor) and value.shape == like.shape:
        # Each rank has the full tensor, so src_data_rank=None avoids a broadcast.
        whole = value.to(like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return value
