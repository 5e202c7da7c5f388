"""Read a `--config` file: TOML, YAML, or the config.json of a run, with sections or flat keys.

A section has the name of a group of settings (`tandem help settings`): `[data]` contains `batch_size`. This
module checks only the position of a key; `sources` checks the key itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.settings import SETTINGS, SLICES, bad_value
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from yaml import MappingNode, Node

NULLS = ("", "~", "null", "Null", "NULL")
DEEPEST = 4
"""Limit on the nesting of a YAML file; a valid one has at most three levels."""


def table_in(path: str) -> dict[str, Any]:
    """Parse a file by its suffix. YAML scalars stay text, and null is None. Raises OSError and ValueError."""
    text = Path(path).read_text(encoding="utf-8")
    if is_of_a_run(path):
        table = json.loads(text)
    elif path.endswith((".yaml", ".yml")):
        table = _yaml(text)
    else:
        # Import it here, because most commands read no file.
        import tomllib

        table = tomllib.loads(text)
    if not isinstance(table, dict):
        raise ValueError(f"the file contains {table!r:.40}")
    return table


def is_of_a_run(path: str) -> bool:
    """Return True if this is the config.json of a run."""
    return path.endswith(".json")


def without_sections(table: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Flatten the sections. Raises ConfigError for a key in the wrong section, or one that is set twice.

    `metrics` is both a section and a setting in that section; with a table as its value it is the section.
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        keys = {name: value}
        is_table = value is None or isinstance(value, dict)
        # An empty section is None in YAML, and counts as a section.
        is_section = name in SLICES and (is_table or name not in SETTINGS)
        if is_section:
            if not is_table:
                bad_value(f"{name} in {file}", value, "a section of settings")
            keys = value or {}
        for key, inner in keys.items():
            group = SETTINGS[key].slice if key in SETTINGS else name
            if is_section and group != name:
                raise ConfigError(f"{name}.{key} in {file}: {key} belongs in the section {group}")
            if key in flat:
                raise ConfigError(f"{key} in {file}: set twice; remove one of the two lines")
            flat[key] = inner
    return flat


def _yaml(text: str) -> Any:
    """Parse YAML into its nodes, not its values, so that scalars stay text.

    As a value of YAML 1.1, `progress: on` would be true. Repeated keys would also be accepted.
    """
    import yaml

    try:
        # SafeLoader, because other loaders can run code of a tag.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if node is None else _value_of(node, DEEPEST)


def _value_of(node: "Node", depth: int) -> Any:
    from yaml import MappingNode, ScalarNode

    # Without a limit, an alias that contains itself would recurse until Python's stack overflows.
    if not depth:
        raise ValueError(f"line {node.start_mark.line + 1} is nested too deeply")
    if isinstance(node, MappingNode):
        return _table_of(node, depth)
    if isinstance(node, ScalarNode):
        # A quoted "null" has a style, and is text.
        return None if node.style is None and node.value in NULLS else node.value
    return [_value_of(each, depth - 1) for each in node.value]


def _table_of(node: "MappingNode", depth: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in node.value:
        name = key.value
        line = key.start_mark.line + 1
        if not isinstance(name, str):
            raise ValueError(f"line {line} has a key that is not a name")
        # YAML forbids repeated keys, but PyYAML keeps the last one silently.
        if name in table:
            raise ValueError(f"line {line} sets {name} again")
        table[name] = _value_of(value, depth - 1)
    return table
