"""Save an optimizer's parameter groups by name, because its own state identifies parameters only by number.

A number that means another parameter is an error deep inside the optimizer, or unnoticed if the shapes agree.
The names are therefore saved next to the state, and compared before it is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError

OF_THE_SHAPE = frozenset({
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg",
    "acc_delta", "sum", "prev", "step_size", "ax", "mu_product_buffer",
})  # fmt: skip
"""Entries of torch's optimizer states that have the parameter's shape."""
SHOWN = 3


def groups_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the optimizer's class and its parameters' names by group; "" for one that is not in `named`."""
    names = {id(parameter): name for name, parameter in named}
    groups = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "names": groups}


def check_groups(
    what: str,
    saved: Mapping[str, Any],
    theirs: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    ours: Mapping[str, Any],
) -> None:
    """Raise ConfigError if the `saved` state of the optimizer `what` belongs to other groups than it has.

    `theirs` and `ours` come from `groups_of`; None means that an older version saved no names.
    """
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        values = {int(index): dict(state) for index, state in saved["state"].items()}
        kind, names = (None, []) if theirs is None else (theirs["class"], list(theirs["names"]))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _other(what, "it is not the state of a PyTorch optimizer") from error
    if kind is not None and kind != ours["class"]:
        raise _other(what, f"it was saved by {kind}, but this optimizer is {ours['class']}")
    here = [len(group["params"]) for group in optimizer.param_groups]
    if len(sizes) != len(here):
        raise _other(what, f"it has {len(sizes)} parameter groups, this optimizer has {len(here)}")
    for number, (there, ours_here) in enumerate(zip_longest(names, ours["names"] if names else [])):
        if there != ours_here:
            raise _other(what, f"group {number} is {_listed(there)} in it but {_listed(ours_here)} here")
    # Names make a better message, but an older version saved none.
    if sizes != here:
        raise _other(what, f"its groups have {_counts(sizes)} parameters, but {_counts(here)} here")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, state in values.items():
        for name, value in state.items():
            shape = tuple(parameters[index].shape) if 0 <= index < len(parameters) else "missing"
            # Entries of other optimizers may have any shape.
            if name in OF_THE_SHAPE and isinstance(value, Tensor) and tuple(value.shape) != shape:
                raise _other(
                    what, f"{name} of parameter {index} is {tuple(value.shape)} in it but {shape} here"
                )


def _other(what: str, how: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint's {what} does not match: {how}; build the optimizer as it was when saved, with the "
        "same groups in the same order, or use another --run-dir or --resume never"
    )


def _listed(names: Sequence[str] | None) -> str:
    more = f" and {len(names) - SHOWN} more" if names and len(names) > SHOWN else ""
    return (", ".join(name or "an unnamed parameter" for name in (names or [])[:SHOWN]) or "nothing") + more


def _counts(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))
