"""Handle the values that a script passes to `Run.keep`: determine their kind, save and restore them."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.checkpoint.plain import UnsupportedValueError, tensor_of
from tandem.errors import ConfigError

VALID = (
    "a module, a tensor, a number, an array of numbers, a random generator, or what has state_dict() and "
    "load_state_dict()"
)
MODEL = "model"
TENSOR = "tensors"
NUMBER = "numbers"
OBJECT = "objects"
"""Kinds of kept values; each is a part of the state."""


def kind_of(value: object) -> str | None:
    """Return the value's kind, or None if it cannot be kept."""
    if isinstance(value, nn.Module):
        return MODEL
    if isinstance(value, Tensor | np.ndarray):
        return TENSOR
    if isinstance(value, bool | int | float):
        return NUMBER
    # Subclasses do not count: random.SystemRandom, for example, has no state.
    if type(value) in _GENERATORS or _has_state(value):
        return OBJECT
    return None


def number_of(value: object) -> bool | int | float | None:
    """Return a Python number for a number, a NumPy number, or a tensor or array of one element; else None."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
            return None
        if isinstance(value, np.ndarray) and value.size != 1:
            return None
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def converted(value: Any) -> Any:
    """Convert a NumPy number to a Python number; return anything else unchanged."""
    plain = number_of(value) if isinstance(value, np.generic) else None
    return value if plain is None else plain


def assigned(name: str, before: Any, value: Any) -> Any:
    """Return `value` as the new value of the kept name `name`.

    Raises ConfigError if its kind, dtype or shape differs from the previous value's.
    """
    kind = kind_of(before)
    if kind == NUMBER:
        number = number_of(value) if not isinstance(value, bool | int | float) else converted(value)
        if number is None:
            raise _changed(name, "a number", type(value).__name__, "assign a number")
        return number
    if kind == TENSOR:
        if kind_of(value) == TENSOR:
            value = _alike(before, value)
        check_form(name, form_of(before), value)
    elif kind_of(value) != kind:
        raise _changed(name, type(before).__name__, type(value).__name__, "assign one of the same kind")
    return value


def form_of(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return the (dtype, shape) of a tensor or array."""
    return str(value.dtype).removeprefix("torch."), tuple(value.shape)


def check_form(name: str, form: tuple[str, tuple[int, ...]], value: Any) -> None:
    """Raise ConfigError if a kept tensor or array no longer has its dtype and shape."""
    now = form_of(value) if kind_of(value) == TENSOR else None
    if now != form:
        got = "of type " + type(value).__name__ if now is None else "{} of shape {}".format(*now)
        raise _changed(
            name,
            "{} of shape {}".format(*form),
            got,
            "wrap a value that changes its form in an object with state_dict()",
        )


def tensor_in(value: Any) -> Tensor:
    """Return a kept tensor or array as a tensor that shares its memory. Raises UnsupportedValueError."""
    return value.detach() if isinstance(value, Tensor) else tensor_of(value)


def put(value: Any, saved: Tensor) -> None:
    """Copy `saved` into a kept tensor or array, in place."""
    if isinstance(value, Tensor):
        # While torch records gradients, it refuses to change a leaf that requires them in place.
        with torch.no_grad():
            value.copy_(saved)
    else:
        value[...] = saved.numpy()


def check_array(name: str, value: object) -> None:
    """Raise ConfigError for an array that cannot be saved or restored in place."""
    if isinstance(value, np.ndarray):
        try:
            tensor_of(value)
        except UnsupportedValueError as error:
            raise ConfigError(
                f"run.keep({name}=...): invalid value, {error.what}; expected {VALID}"
            ) from error
        if not value.flags.writeable:
            raise ConfigError(f"run.keep({name}=...) got a read-only array; pass a copy, {name}.copy()")


def state_of(value: Any) -> Any:
    """Return the state of an object: its state_dict(), or a random generator's state."""
    if type(value) in _GENERATORS:
        return _GENERATORS[type(value)][0](value)
    return value.state_dict()


def restore(value: Any, state: Any) -> None:
    """Restore what `state_of` returned."""
    if type(value) in _GENERATORS:
        _GENERATORS[type(value)][1](value, state)
    else:
        value.load_state_dict(state)


def _has_state(value: object) -> bool:
    if isinstance(value, type):  # a class has the functions, but no state
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _alike(before: Any, value: Any) -> Any:
    """Convert between tensor and array to match the kept value."""
    if isinstance(before, Tensor) and isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(before.device)
    if isinstance(before, np.ndarray) and isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value


def _changed(name: str, before: str, now: str, advice: str) -> ConfigError:
    return ConfigError(f"the kept {name!r} was {before} and is now {now}; {advice}")


def _numpys_state(generator: np.random.Generator) -> Mapping[str, Any]:
    return generator.bit_generator.state


def _set_numpys_state(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (_numpys_state, _set_numpys_state),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
}
"""How the state of each kind of random generator is read and set."""
