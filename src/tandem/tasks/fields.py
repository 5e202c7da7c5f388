"""A task's own settings: texts from `--task.FIELD VALUE` become values of the dataclass field's type."""

import dataclasses
import types
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tandem.data.datasets import one_line
from tandem.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def field_names(task_class: type[Any]) -> list[str]:
    """The fields that can be given a value, in their order; none for a class that is no dataclass."""
    if not dataclasses.is_dataclass(task_class):
        return []
    return [field.name for field in dataclasses.fields(task_class) if field.init]


def convert_fields(
    task_class: type[Any], name: str, texts: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, Any]:
    """Keyword arguments for `task_class`: the texts converted, and those of `given` that it has fields for.

    Raises ConfigError on an unknown field, a value that does not fit, and a required field without one.
    """
    known = field_names(task_class)
    values: dict[str, Any] = {field: value for field, value in given.items() if field in known}
    hints = _hints(task_class, name) if texts else {}
    for key, text in texts.items():
        field = key.replace("-", "_")
        if field in given:
            raise ConfigError(f"--task.{key} is set with --{field.replace('_', '-')}: give that instead")
        if field not in known:
            free = [known_field for known_field in known if known_field not in given]
            raise ConfigError(f"task {name} has no field {key!r}{_nearest(field, free)}")
        try:
            values[field] = _convert(text, hints[field])
        except ValueError as error:
            raise ConfigError(f"--task.{key} is {text!r}: {error}") from error
    if absent := [field for field in _required(task_class) if field not in values]:
        flags = " ".join(f"--task.{field} VALUE" for field in absent)
        raise ConfigError(f"task {name} needs {flags}")
    return values


def _required(task_class: type[Any]) -> list[str]:
    if not dataclasses.is_dataclass(task_class):
        return []
    return [
        field.name
        for field in dataclasses.fields(task_class)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]


def _hints(task_class: type[Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(task_class)
    except Exception as error:  # the annotations are the user's code
        raise ConfigError(f"the field types of task {name} cannot be read ({one_line(error)})") from error


def _convert(text: str, kind: Any) -> Any:
    """`text` as a value of type `kind`; ValueError says what is valid."""
    if get_origin(kind) in (Union, types.UnionType):
        return _convert_union(text, get_args(kind))
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError(f"give one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError("give true or false")
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"give {'a whole number' if kind is int else 'a number'}") from None
    if kind in (str, Path, Any):
        return Path(text) if kind is Path else text
    raise ValueError(
        f"a field of type {getattr(kind, '__name__', kind)} cannot be set from text; "
        "int, float, bool, str, Path, Literal and X | None can"
    )


def _convert_union(text: str, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and text.lower() in ("", "none"):
        return None
    problems = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _convert(text, kind)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(" or ".join(problems) + (", or none" if type(None) in kinds else ""))


def _nearest(field: str, known: list[str]) -> str:
    if not known:
        return ": it has none"
    near = get_close_matches(field, known, n=1)
    meant = f", did you mean --task.{near[0]}" if near else ""
    return f"{meant}; it has {', '.join(known)}"
