"""What a checkpoint holds of a loop of one's own: whatever the script has named to `Run.keep`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tandem.checkpoint.flatten import flatten
from tandem.checkpoint.state import check_loadable
from tandem.distributed.replica import Replica
from tandem.errors import CheckpointError, ConfigError
from tandem.training.learner import rank_zeros
from tandem.training.resume import check_shapes

VALID = "a module, a tensor, a number, or what has state_dict() and load_state_dict()"


class Kept(SimpleNamespace):
    """What is kept, by the names given to `Run.keep`; a number is changed by assigning to it."""


class KeptState:
    """The kept objects as a state by part.

    "model": tensors of all modules, by their own names where there is one module, else by "NAME.their name".
    "tensors": other tensors. "objects": what has a state_dict(). "numbers". The rest is what `live` gives.
    """

    def __init__(self, kept: Kept, wrapped: Sequence[nn.Module]) -> None:
        """Raises ConfigError for what cannot be kept, and for a model that trains but is not `wrapped`."""
        self._kept, self._names, self._wrapped = kept, list(vars(kept)), wrapped
        self.live: Callable[[], dict[str, Any]] = dict
        trained = {id(p) for module in wrapped for p in unwrapped(module).parameters()}
        for name, value in vars(kept).items():
            self._check(name, value, trained)
        try:
            check_loadable(self.whole())
        except CheckpointError as error:
            raise ConfigError(f"run.keep: {error}") from error

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The kept modules, without what wraps them."""
        return {n: unwrapped(v) for n, v in self._values().items() if isinstance(v, nn.Module)}

    @property
    def together(self) -> nn.Module:
        """The kept modules as one, whose names are those of `weights`."""
        modules = self.modules
        return next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The kept optimizers, in the order of naming."""
        return [each for each in self._values().values() if isinstance(each, torch.optim.Optimizer)]

    def whole(self) -> dict[str, Any]:
        """All of it, "model" first. Exchanges nothing: every rank has everything."""
        values = self._values()
        objects = {name: value.state_dict() for name, value in values.items() if _is_object(value)}
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        parts = {"model": self.weights(), "tensors": tensors, "objects": objects, "numbers": numbers}
        return {**parts, **self.live()}

    def weights(self) -> dict[str, Any]:
        """The part "model"."""
        modules = self.modules
        if len(modules) == 1:
            return dict(next(iter(modules.values())).state_dict())
        return {
            f"{n}.{key}": value for n, module in modules.items() for key, value in module.state_dict().items()
        }

    @cached_property
    def rank_zeros(self) -> frozenset[int]:
        """Which tensors of the flattened state rank 0 alone has right: buffers, and what is not trained."""
        replicated, own, index = {id(unwrapped(each)) for each in self._wrapped}, set[int](), 0
        for module in self.modules.values():
            count = len(flatten(module.state_dict())[1])
            mine = rank_zeros(module) if id(module) in replicated else range(count)
            own.update(index + each for each in mine)
            index += count
        loose = sum(isinstance(value, Tensor) for value in self._values().values())
        return frozenset(own | set(range(index, index + loose)))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what `whole` gave. Raises ConfigError where it is of other objects."""
        check_shapes(self.weights(), saved.get("model", {}))
        values = self._values()
        for part, here in (("tensors", Tensor), ("objects", object), ("numbers", int | float)):
            mine = {
                n for n, v in values.items() if (_is_object(v) if here is object else isinstance(v, here))
            }
            theirs = set(saved.get(part, {}))
            if mine != theirs:
                raise ConfigError(
                    f"the checkpoint keeps other {part}: {_listed(theirs)} in it, {_listed(mine)} here; "
                    "keep the same, or give another --run-dir or --resume never"
                )
        modules = self.modules
        for name, module in modules.items():
            prefix = "" if len(modules) == 1 else f"{name}."
            state = {
                key.removeprefix(prefix): v for key, v in saved["model"].items() if key.startswith(prefix)
            }
            module.load_state_dict(state)
        for name, value in saved["tensors"].items():
            check_shapes({name: values[name]}, {name: value})
            with torch.no_grad():
                values[name].copy_(value)
        for name, state in saved["objects"].items():
            try:
                values[name].load_state_dict(state)
            except (ValueError, KeyError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's {name} does not fit ({error}); give another --run-dir, "
                    "or --resume never"
                ) from error
        for name, value in saved["numbers"].items():
            setattr(self._kept, name, value)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self._kept, name) for name in self._names}

    def _check(self, name: str, value: object, trained: set[int]) -> None:
        if not (isinstance(value, nn.Module | Tensor | int | float) or _is_object(value)):
            raise ConfigError(f"run.keep({name}=...) got {type(value).__name__}, valid is {VALID}")
        if isinstance(value, torch.optim.Optimizer):
            mine = [p for group in value.param_groups for p in group["params"] if p.requires_grad]
            if any(id(parameter) not in trained for parameter in mine):
                raise ConfigError(
                    f"run.keep({name}=...): it trains a model never wrapped, whose gradients would differ "
                    "between ranks; model = run.wrap(model) comes first, then the optimizer"
                )


def unwrapped(module: nn.Module) -> nn.Module:
    """The model that `Run.wrap` was given."""
    return module.model if isinstance(module, Replica) else module


def _is_object(value: object) -> bool:
    has_state = callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )
    return has_state and not isinstance(value, nn.Module | Tensor)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
