"""Validate what a task's methods return: a one-line error with file and line of the method.

A method is checked on its first return value, before the first step. Does not import `base`.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tandem.data.loader import tensor_of
from tandem.errors import ConfigError
from tandem.text import one_line

Sums = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""{name: (sum over the samples, number of samples)}; tandem adds up both and divides once."""
Outputs = Mapping[str, Any]
"""{name: a tensor or list with a row per sample}."""
OUTPUTS = "evaluate_batch returns ({name: (sum, count)}, {name: a tensor or list, a row for each sample})"
LOSS = "return the mean loss, or (mean loss, {name: (sum, count)})"
SCORES = "return {name: (sum, count)}, each a number or a tensor with one element"


def mistake(method: Callable[..., Any], got: str, valid: str, verb: str = "returns") -> ConfigError:
    """Return the error for a wrong method: its location, what is wrong, and what to do."""
    return ConfigError(f"{line_of(method)}{getattr(method, '__name__', 'the task')} {verb} {got}; {valid}")


@contextmanager
def at(method: Callable[..., Any]) -> Iterator[None]:
    """Prefix the location of `method` to a ConfigError raised inside the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{line_of(method)}{error}") from error


def line_of(method: Callable[..., Any]) -> str:
    """Return `my_task.py line 12: `, the line of a method's `def` or first decorator; "" without source."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    # A callable object or a function in C has no line.
    if code is None:
        return ""
    path = Path(code.co_filename)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown} line {code.co_firstlineno}: "


def where(error: Exception) -> str:
    """Return the error on one line, with the last line of code that led to it."""
    if isinstance(error, SyntaxError):
        return one_line(error)  # contains the file and the line
    # Frames such as `<frozen importlib._bootstrap>` are in no file.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename[0] != "<"]
    return f"{one_line(error)}, {frames[-1].filename} line {frames[-1].lineno}" if frames else one_line(error)


def kind(value: Any) -> str:
    """Describe a value in words."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else "a tensor"
    if isinstance(value, nn.Module):
        return f"the model {type(value).__name__}"
    # A named tuple is described by its own name below.
    if isinstance(value, tuple | list) and type(value).__name__ in ("tuple", "list"):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def loss_and_sums(method: Callable[..., Any], outcome: Any, trains: bool = False) -> tuple[Tensor, Sums]:
    """Return the result of a task's `loss` as (scalar, sums). Raises ConfigError for any other form."""
    loss: Any = outcome
    sums: Sums = {}
    if isinstance(outcome, tuple):
        if len(outcome) != 2 or not isinstance(outcome[1], Mapping):
            raise mistake(method, kind(outcome), LOSS)
        loss, sums = outcome
    if not isinstance(loss, Tensor):
        hint = "return the tensor itself, without .item() or float()"
        raise mistake(method, kind(loss), hint if isinstance(loss, Number) else LOSS)
    if loss.dim():
        if loss.numel() != 1:
            raise mistake(method, kind(loss), "return the mean over the samples, a tensor with one element")
        loss = loss.reshape(())
    if trains and not loss.requires_grad:
        raise mistake(
            method,
            "a tensor that has no gradient",
            "compute it from the model's output, without detach(), .data or no_grad()",
        )
    return loss, sums


def check_sums(method: Callable[..., Any], sums: Any) -> None:
    """Raise ConfigError unless `sums` is {name: (sum, count)}."""
    if not isinstance(sums, Mapping):
        raise mistake(method, kind(sums), SCORES)
    for name, pair in sums.items():
        if not (isinstance(pair, tuple | list) or hasattr(pair, "shape")) or _length(pair) != 2:
            raise mistake(method, f"{kind(pair)} for {name!r}", SCORES)
        if not all(_is_number(part) for part in pair):
            raise mistake(method, f"({name!r}: ({', '.join(map(kind, pair))}))", SCORES)


def sums_and_outputs(method: Callable[..., Any], made: Any, size: int, gathers: bool) -> tuple[Sums, Outputs]:
    """Return (sums, outputs) of an evaluation batch of `size`; outputs only if the task gathers them.

    Raises ConfigError for any other form.
    """
    is_pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Mapping) for part in made)
    if is_pair != gathers:
        got = "outputs, but the task has no evaluate_all" if is_pair else f"{kind(made)} without outputs"
        raise mistake(method, got, f"in a task with evaluate_all, {OUTPUTS}")
    sums, outputs = made if is_pair else (made, {})
    check_sums(method, sums)
    for name, rows in outputs.items():
        is_rows = (isinstance(rows, Tensor) and rows.dim() > 0) or isinstance(rows, list)
        if not is_rows or len(rows) != size:
            raise mistake(method, f"{kind(rows)} for {name!r} of {size} samples", OUTPUTS)
    return sums, outputs


def weight_of(method: Callable[..., Any], weight: Any) -> Tensor | float:
    """Return the result of a task's `weight` for a batch. Raises ConfigError if it is not a number."""
    if not _is_number(weight):
        raise mistake(
            method, kind(weight), "return how many items (such as tokens) the loss is the mean over"
        )
    found: Tensor | float = weight
    return found


def check_scores(method: Callable[..., Any], scores: Any) -> None:
    """Raise ConfigError unless `scores` is {name: number}."""
    if not isinstance(scores, Mapping) or not all(_is_number(value) for value in scores.values()):
        got = (
            ", ".join(f"{name}: {kind(value)}" for name, value in scores.items())
            if isinstance(scores, Mapping)
            else kind(scores)
        )
        raise mistake(method, got, "return {name: number}")


def check_batch(collate: Callable[..., Any] | None, build_datasets: Callable[..., Any], batch: Any) -> None:
    """Raise ConfigError, with the location, for a batch whose size cannot be determined."""
    if tensor_of(batch) is None:
        got = "a batch without a tensor" if collate else "datasets whose batches have no tensor"
        advice = "the first tensor's length is the number of samples"
        raise mistake(collate or build_datasets, got, advice)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    # Larger arrays also have __float__, but it raises for them.
    return isinstance(value, Number) or (hasattr(value, "__float__") and getattr(value, "size", 0) == 1)


def _length(value: Any) -> int:
    shape = getattr(value, "shape", None)
    return len(value) if shape is None else int(shape[0]) if len(shape) == 1 else 0
