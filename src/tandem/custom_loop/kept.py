"""Define what a checkpoint of a custom loop contains: everything that the script passed to `Run.keep`."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.checkpoint.snapshot import PER_RANK
from tandem.checkpoint.state import deserialize, flatten, serialize
from tandem.custom_loop.values import (
    MODEL,
    NUMBER,
    OBJECT,
    TENSOR,
    VALID,
    assigned,
    check_array,
    check_form,
    converted,
    form_of,
    kind_of,
    put,
    restore,
    state_of,
    tensor_in,
)
from tandem.distributed.group import ProcessGroup
from tandem.distributed.replica import Replica
from tandem.errors import ConfigError
from tandem.telemetry.recorder import Recorder
from tandem.text import did_you_mean, nearest
from tandem.training.buffers import adopt_buffers, has_saved_buffers
from tandem.training.optim import check_groups, groups_of
from tandem.training.rank_checks import checksum
from tandem.training.train_state import check_shapes, indices_outside, parameter_names

# Check that values that should be equal on all ranks are: a checkpoint contains only rank 0's.

log = logging.getLogger("tandem.run")


class Differences:
    """Compare kept values between ranks by checksums, and report each name that differs once."""

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._reported = set[str]()

    def report_new(self, values: Mapping[str, Any], recorder: Recorder, step: int) -> None:
        """Compare `values`, by name. All ranks call this at the same step."""
        if self._world.size == 1:
            return
        ranks = self._world.gather_json({name: digest_of(value) for name, value in values.items()})
        first = ranks[0]
        found = [name for name in first if any(rank.get(name) != first[name] for rank in ranks)]
        new = [name for name in found if name not in self._reported]
        # Do this on all ranks, so that they need no other exchange to agree on the new names.
        self._reported.update(new)
        if not new or not self._world.is_first:
            return
        recorder.event("kept_differs", step=step, names=new)
        log.warning(
            "%s: kept, but different on each rank at step %s; a checkpoint has rank 0's value only, so all "
            "ranks have that value after a restart. Name it in run.keep(..., per_rank={%r: ...})",
            ", ".join(new),
            f"{step:,}",
            new[0],
        )


def digest_of(value: Any) -> str:
    """Return a short hash that differs if two values differ."""
    skeleton, tensors = flatten({"": value})
    total = hashlib.sha256(repr(skeleton).encode(errors="replace"))
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}{int(checksum(tensor))}".encode())
    return total.hexdigest()[:16]


class KeptValues(SimpleNamespace):
    """The kept values, by the names given to `Run.keep`. Assign to a number to change it."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: converted(value) for name, value in values.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a value.

        Raises ConfigError if its kind differs from the previous value's, and for a name that is not kept: no
        checkpoint would contain the value.
        """
        here = vars(self)
        if name not in here:
            expected = f"; kept: {', '.join(here)}; to keep another value, pass it to run.keep"
            raise ConfigError(f"run.keep was not given {name!r}{did_you_mean(nearest(name, here), expected)}")
        super().__setattr__(name, assigned(name, here[name], value))


class KeptState:
    """The kept objects as a state with parts.

    "model": tensors of all modules, by their own names if there is one module, else as "NAME.their name".
    "tensors": other tensors. "objects": objects with a state_dict(). "numbers": numbers. The rest is what
    `live` returns. Values in `per_rank` are in none of these; see `per_rank_state`.
    """

    def __init__(
        self,
        kept: KeptValues,
        wrapped: Sequence[nn.Module],
        world: ProcessGroup,
        per_rank: Sequence[str] = (),
    ) -> None:
        """Check and collect the values.

        Raises ConfigError for values that cannot be kept, for a trained model that is not in `wrapped`, and
        for one in `wrapped` whose weights are in no value.
        """
        self._kept = kept
        self._wrapped = wrapped
        self._world = world
        self.per_rank = list(per_rank)
        self._shared = [name for name in vars(kept) if name not in self.per_rank]
        self.live: Callable[[], dict[str, Any]] = dict
        trained = {id(p) for module in wrapped for p in unwrapped(module).parameters()}
        for name, value in vars(kept).items():
            self._check(name, value, trained)
        self._forms = {n: form_of(v) for n, v in vars(kept).items() if kind_of(v) == TENSOR}
        self._differences = Differences(world)
        # Fail here, not at the first save, if a state cannot be written.
        flatten({**self.full_state(), PER_RANK: self.per_rank_state()})
        self._check_wrapped()

    @property
    def has_per_rank_state(self) -> bool:
        """Whether something is kept per rank."""
        return bool(self.per_rank)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The kept modules, without their wrappers."""
        return {name: unwrapped(value) for name, value in self._of(MODEL).items()}

    @property
    def as_module(self) -> nn.Module:
        """The kept modules as one, with the same names as `weights`."""
        modules = self.modules
        return next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The kept optimizers, in the order in which they were named."""
        return list(self._optimizers().values())

    def full_state(self) -> dict[str, Any]:
        """Return everything that ranks have in common, "model" first.

        Exchanges nothing, because every rank has all of it. Raises ConfigError for a tensor whose dtype or
        shape has changed.
        """
        objects = {name: state_of(value) for name, value in self._of(OBJECT).items()}
        tensors = {name: self._tensor(name, value) for name, value in self._of(TENSOR).items()}
        parts = {"model": self.weights(), TENSOR: tensors, OBJECT: objects, NUMBER: self._of(NUMBER)}
        return {**parts, **self.live()}

    def local_state(self) -> dict[str, Any]:
        """Return the same, because nothing is sharded."""
        return self.full_state()

    def per_rank_state(self) -> dict[str, Any]:
        """Return this rank's own values, by name. Exchanges nothing."""
        found = dict[str, Any]()
        for name in self.per_rank:
            value = getattr(self._kept, name)
            kind = kind_of(value)
            found[name] = (
                value if kind == NUMBER else self._tensor(name, value) if kind == TENSOR else state_of(value)
            )
        return found

    def checkpoint_extras(self, recorder: Recorder, step: int) -> dict[str, Any]:
        """Return the names of the optimizers' parameters, and every rank's own values.

        All ranks call this. At the first save at which common values differ between ranks, rank 0 logs it.
        """
        groups = {name: self._groups(optimizer) for name, optimizer in self._optimizers().items()}
        self._differences.report_new(self._comparable(), recorder, step)
        if not self.per_rank:
            return {"groups": groups}
        parts = self._world.gather_bytes(serialize({PER_RANK: self.per_rank_state()}))
        return {"groups": groups, PER_RANK: [deserialize(part)[PER_RANK] for part in parts]}

    def _comparable(self) -> dict[str, Any]:
        """Return, by name, the values that should be equal on all ranks and that no replica check covers."""
        values = {
            **self._of(NUMBER),
            **{name: self._tensor(name, value) for name, value in self._of(TENSOR).items()},
            **{name: state_of(value) for name, value in self._of(OBJECT).items()},
        }
        for name, optimizer in self._optimizers().items():  # its tensors follow from exchanged gradients
            values[name] = [{**group, "params": None} for group in optimizer.param_groups]
        replicas = {id(unwrapped(each)) for each in self._wrapped}
        for name, module in self.modules.items():
            if id(module) not in replicas:
                values[name] = dict(module.named_parameters())
        return values

    def weights(self) -> dict[str, Any]:
        """Return the part "model"."""
        modules = self.modules
        if len(modules) == 1:
            return dict(next(iter(modules.values())).state_dict())
        return {
            f"{n}.{key}": value for n, module in modules.items() for key, value in module.state_dict().items()
        }

    @property
    def has_rank_0_tensors(self) -> bool:
        """Whether there may be tensors that `rank_0_indices` names."""
        modules = self.modules.values()
        return bool(
            self._of(TENSOR)
            or any(map(has_saved_buffers, modules))
            or self.rank_0_indices({"model": self.weights(), "tensors": {}})
        )

    def rank_0_indices(self, state: Mapping[str, Any]) -> frozenset[int]:
        """Return the indices, in the flattened state, of tensors whose values are taken only from rank 0.

        These are buffers and untrained parameters.
        """
        return indices_outside({**state["model"], "": state["tensors"]}, self._ranks_share)

    @cached_property
    def _ranks_share(self) -> frozenset[str]:
        """Return the names in "model" of the parameters that all ranks train."""
        replicated = {id(unwrapped(each)) for each in self._wrapped}
        modules = self.modules
        prefixes = {name: "" if len(modules) == 1 else f"{name}." for name in modules}
        trained = {n: parameter_names(m) for n, m in modules.items() if id(m) in replicated}
        return frozenset(prefixes[n] + name for n, names in trained.items() for name in names)

    def load(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore what `full_state` and `per_rank_state` returned.

        Raises ConfigError if it belongs to other objects.
        """
        modules = self.modules
        parts = {
            name: _part(saved.get("model", {}), "" if len(modules) == 1 else f"{name}.") for name in modules
        }
        for name, module in modules.items():
            # A forward pass may have created or reshaped buffers, and the shapes are compared next.
            adopt_buffers(module, parts[name])
        check_shapes(self.weights(), saved.get("model", {}))
        for part in (TENSOR, OBJECT, NUMBER):
            own_names = set(self._of(part))
            saved_names = set(saved.get(part, {}))
            if own_names != saved_names:
                raise ConfigError(
                    f"the checkpoint has different {part}: {_listed(saved_names)} in it, "
                    f"{_listed(own_names)} here; keep the same values, or use another --run-dir or "
                    "--resume never"
                )
        # All checks precede the first change, so that an error leaves the objects as they were.
        for name, optimizer in self._optimizers().items():
            theirs_of = saved.get("groups", {}).get(name)
            check_groups(name, saved[OBJECT][name], theirs_of, optimizer, self._groups(optimizer))
        for name, module in modules.items():
            module.load_state_dict(parts[name])
        for name, value in {**saved[TENSOR], **saved[OBJECT], **saved[NUMBER], **own}.items():
            self._put_back(name, value)

    def _put_back(self, name: str, saved: Any) -> None:
        value = getattr(self._kept, name)
        kind = kind_of(value)
        if kind == NUMBER:
            setattr(self._kept, name, saved)
        elif kind == TENSOR:
            if not isinstance(saved, Tensor):
                # The value may have been an array or a number when it was saved.
                saved = torch.from_numpy(saved) if isinstance(saved, np.ndarray) else torch.as_tensor(saved)
            check_shapes({name: value}, {name: saved})
            put(value, saved)
        else:
            try:
                restore(value, saved)
            # Any class may define the load_state_dict that is called here.
            except (ValueError, KeyError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's {name} does not match ({error}); use another --run-dir, "
                    "or --resume never"
                ) from error

    def _of(self, kind: str) -> dict[str, Any]:
        """Return the common values of one kind."""
        values = {name: getattr(self._kept, name) for name in self._shared}
        return {name: value for name, value in values.items() if kind_of(value) == kind}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {n: each for n, each in self._of(OBJECT).items() if isinstance(each, torch.optim.Optimizer)}

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        modules = self.modules.items()
        return groups_of(optimizer, ((f"{n}.{at}", p) for n, m in modules for at, p in m.named_parameters()))

    def _tensor(self, name: str, value: Any) -> Tensor:
        check_form(name, self._forms.get(name, form_of(value)), value)
        return tensor_in(value)

    def _check(self, name: str, value: object, trained: set[int]) -> None:
        if isinstance(value, type):
            raise ConfigError(
                f"run.keep({name}=...): got the class {value.__name__}; pass an object of it, such as "
                f"{value.__name__}(...)"
            )
        if kind_of(value) is None:
            raise ConfigError(f"run.keep({name}=...): invalid type {type(value).__name__}; expected {VALID}")
        check_array(name, value)
        if isinstance(value, torch.optim.Optimizer) and name not in self.per_rank:
            parameters = [p for group in value.param_groups for p in group["params"] if p.requires_grad]
            if any(id(parameter) not in trained for parameter in parameters):
                raise ConfigError(
                    f"run.keep({name}=...): it trains a model that was not wrapped, so its gradients "
                    "would differ between ranks; call model = run.wrap(model) before creating the optimizer"
                )
        if name in self.per_rank and isinstance(value, Replica):
            raise ConfigError(
                f"run.keep(per_rank={{{name!r}: ...}}): a wrapped model is the same on all ranks; name it as "
                f"run.keep({name}=...)"
            )

    def _check_wrapped(self) -> None:
        """Raise ConfigError if a trained weight of a wrapped model is in no kept value.

        A module or tensor is recognized by its memory. Any other object may return copies from its
        state_dict(), so there an equal shape suffices.
        """
        kept = {id(p) for module in self.modules.values() for p in module.parameters()}
        left = [p for module in self._wrapped for p in _trained(module) if id(p) not in kept]
        if not left:
            return
        others = {n: o for n, o in self._of(OBJECT).items() if not isinstance(o, torch.optim.Optimizer)}
        _, copies = flatten({OBJECT: {name: state_of(value) for name, value in others.items()}})
        _, own = flatten(self.per_rank_state())
        shapes = {tuple(tensor.shape) for tensor in (*copies, *own)}
        memory = {_memory_of(tensor_in(value)) for value in self._of(TENSOR).values()}
        if all(tuple(p.shape) in shapes or _memory_of(p) in memory for p in left):
            return
        model = next(unwrapped(m) for m in self._wrapped if any(p is left[0] for p in m.parameters()))
        raise ConfigError(
            f"run.keep got no value with the weights of the wrapped {type(model).__name__}, so no checkpoint "
            "would contain them; name the model as well, as in run.keep(model=model, ...)"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model that `Run.wrap` received."""
    return module.model if isinstance(module, Replica) else module


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in unwrapped(module).parameters() if parameter.requires_grad]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries below `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
