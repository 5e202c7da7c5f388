"""A task's own settings: convert the text of `--task.FIELD VALUE` to the type of the dataclass field."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tandem.data.datasets import one_line
from tandem.errors import ConfigError
from tandem.text import did_you_mean, nearest

_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_FROM_TEXT: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("an integer", int),
    float: ("a number", float),
    # bool(text) would be true for any text, even `false`.
    bool: ("true or false", lambda text: _TRUTH[text.lower()]),
    str: ("text", str),
    Any: ("text", str),
    Path: ("a path", Path),
    # `_convert` accepts None earlier, so all other text is rejected here, by a KeyError.
    NoneType: ("none", dict[str, None]().__getitem__),
}
_SETTABLE = "int, float, bool, str, Path, Literal and X | None"


def convert_fields(
    task_class: type[Any], name: str, texts: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, Any]:
    """Return the keyword arguments of `task_class`: converted texts, and values of `given` with a field.

    Raises ConfigError for an unknown field, an invalid value, and a required field without a value.
    """
    declared = dataclasses.fields(task_class) if dataclasses.is_dataclass(task_class) else ()
    known = {field.name: field for field in declared if field.init}
    values: dict[str, Any] = {field: value for field, value in given.items() if field in known}
    # Annotations are evaluated only if a value needs them, because that runs the task's code and may fail.
    hints = _hints(task_class, name) if texts else {}
    for key, text in texts.items():
        field = key.replace("-", "_")
        if field in given:
            raise ConfigError(f"--task.{key} cannot be set; use --{field.replace('_', '-')} instead")
        if field not in known:
            free = [other for other in known if other not in given]
            raise ConfigError(f"task {name} has no field {key!r}{_hint(field, free)}")
        try:
            values[field] = _convert(hints[field], text)
        except ValueError as error:
            raise ConfigError(f"--task.{key}: invalid value {text!r}; {error}") from error
    if absent := [field for field in known if field not in values and _is_required(known[field])]:
        flags = " ".join(f"--task.{field} VALUE" for field in absent)
        raise ConfigError(f"task {name} needs {flags}")
    return values


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _hints(task_class: type[Any], name: str) -> dict[str, Any]:
    try:
        # After `from __future__ import annotations`, a field's own type is only text.
        return get_type_hints(task_class)
    except Exception as error:  # the annotations are the user's code
        raise ConfigError(f"cannot read the field types of task {name} ({one_line(error)})") from error


def _convert(kind: Any, text: str) -> Any:
    """Convert `text` to `kind`, or to the first type of a union that accepts it. Raises ValueError.

    The error's text says what is valid.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if NoneType in kinds and text.lower() in ("", "none"):
        return None
    valid = []
    for choice in kinds:
        if get_origin(choice) is Literal:
            words = f"one of {', '.join(map(str, get_args(choice)))}"
            convert: Callable[[str], Any] = {str(value): value for value in get_args(choice)}.__getitem__
        elif choice in _FROM_TEXT:
            words, convert = _FROM_TEXT[choice]
        else:
            name = getattr(choice, "__name__", choice)
            raise ValueError(f"a field of type {name} cannot be set from the command line; use {_SETTABLE}")
        try:
            return convert(text)
        except (ValueError, KeyError):
            valid.append(words)
    raise ValueError(f"expected {', or '.join(valid)}")


def _hint(field: str, known: list[str]) -> str:
    if not known:
        return "; it has no fields"
    near = nearest(field, known)
    return f"{did_you_mean(near and f'--task.{near}', ';')} its fields are {', '.join(known)}"
