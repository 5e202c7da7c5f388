"""Compare the names and shapes of a model's tensors with those of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tandem.errors import ConfigError
from tandem.training.buffers import adopt_buffers, is_lazy

# torch stores the result of a module's get_extra_state() under this name.
EXTRA = "_extra_state"


def check_shapes(model_state: Mapping[str, Any], saved_state: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first tensor that differs between a model's state and a checkpoint's.

    The result of a module's get_extra_state() may change its shape.
    """
    for name in sorted({*model_state, *saved_state}):
        if name in saved_state and is_lazy(model_state.get(name)):
            continue  # it gets its shape when it is loaded
        here = tuple(getattr(model_state[name], "shape", ())) if name in model_state else "missing"
        there = tuple(getattr(saved_state[name], "shape", ())) if name in saved_state else "missing"
        is_extra = name.rpartition(".")[2] == EXTRA and name in model_state and name in saved_state
        if here != there and not is_extra:
            raise ConfigError(
                f"the checkpoint is from a different model: {name} is {there} in it but {here} here; "
                "use another --run-dir or --resume never"
            )


def check_model(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Call `check_shapes` with an error for verbs that build a task's model for a checkpoint."""
    adopt_buffers(model, weights)
    try:
        check_shapes(model.state_dict(), weights)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}; use the task and fields it was trained with"
        ) from error
