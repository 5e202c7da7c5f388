"""The sources of values: flags > environment TANDEM_* > .env > --config FILE > defaults.

Compose has the same order, because it makes .env part of the environment.

All sources provide text (`Given`), the one with the highest precedence wins, and only winning values are
converted. An unknown name is an error with the nearest match, so that a typo cannot silently train with a
default.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.config.fields import plain
from tandem.config.removed import removed_name_message, removed_value_message, translated
from tandem.config.settings import SETTINGS, SLICES, Settings, bad_value, checked, unknown
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from dotenv.parser import Original
    from yaml import Node

PREFIX = "TANDEM_"
TASK_PREFIX = "TANDEM_TASK__"
# Other code reads these, so they are not typos of a setting.
OTHER_VARIABLES = [
    PREFIX + name
    for name in "CONFIG LOG_LEVEL STATE_DIR JOB_SECRET JOB_SECRET_FILE REQUIRE TRIALS SCREENSHOTS".split()
    + "COMPOSE_PROJECT COMPOSE_NODES COMPOSE_INDEX COMPOSE_GPUS".split()
]
EXPORTED = {PREFIX + name for name in ("LOG_LEVEL", "STATE_DIR", "REQUIRE", "TRIALS", "SCREENSHOTS")}
"""Variables that must be in the environment; .env has no effect on them."""
DOTENV = Path(".env")
# A Kubernetes Service named tandem-* adds these variables to every pod of its namespace.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)\w*=|PORT=\w+://).*"
)
_OF_TANDEM = re.compile(rf"^\s*(export\s+)?{PREFIX}", re.MULTILINE)
TASK_VALID = SETTINGS["task_fields"].valid
FIELDS = tuple(name for name, setting in SETTINGS.items() if not setting.is_table)
PLACES = ("run_dir", "node_rank", "master", "notify")
"""Settings with addresses of a run, which another run with this config.json must not reuse."""
CONFIG_HELP = (
    "file of settings: TOML, YAML, or the config.json of a run (its paths and addresses are ignored)"
)
CONFIG_VALID = "a TOML or YAML file, or a run's config.json"
VARIABLES = {SETTINGS[name].variable: name for name in FIELDS}


class Given(NamedTuple):
    """One value as the user wrote it. Keys of a layer are setting names, `task.NAME`, and `config`."""

    text: str
    source: str  # for `explain`, such as "environment TANDEM_LR"
    name: str  # for errors, such as "TANDEM_LR"


@dataclass(frozen=True)
class Loaded:
    """Settings with their sources ("flag --lr", "default"); the task's own are under `task.NAME`.

    `notes`: messages about parts of a file that were ignored.
    """

    settings: Settings
    sources: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> frozenset[str]:
        """The settings that were given a value, even if it equals the default."""
        return frozenset(name for name, source in self.sources.items() if source != "default")


def resolve(flags: Mapping[str, Given], environ: Mapping[str, str], dotenv: Path | None = DOTENV) -> Loaded:
    """Combine flags, environment and files into settings.

    Raises a one-line ConfigError for an unknown name (with the nearest match), an invalid value or a bad
    file.
    """
    variables = dotenv_variables(dotenv)
    file_name = "" if dotenv is None else dotenv.name
    implied = _from_variables(variables, lambda name: (file_name, f"{name} in {file_name}"))
    named = {**_from_environment(environ), **flags}
    given = {**implied, **named}
    notes: tuple[str, ...] = ()
    if "config" in given:
        # The file is read after the other sources, because any of them may name it.
        file, notes = _from_file(given["config"], given)
        given = {**file, **given}
        del given["config"]
    values = {key: _typed(key, value) for key, value in given.items() if not key.startswith("task.")}
    fields = {
        key.removeprefix("task."): value.text for key, value in given.items() if key.startswith("task.")
    }
    settings = Settings().replace(**values, task_fields=fields)
    notes += tuple(
        f"{name} in {file_name} has no effect; export it in the environment instead"
        for name in sorted(variables.keys() & EXPORTED)
    )
    sources = dict.fromkeys(FIELDS, "default") | {key: value.source for key, value in given.items()}
    return Loaded(settings, sources, notes)


def _typed(key: str, given: Given) -> object:
    # An empty flag is an error, because a script's unset variable (--lr "$LR") must not train with a
    # default.
    if not given.text.strip():
        bad_value(given.name, given.text, SETTINGS[key].valid)
    # Check this before the conversion, whose error would not say what replaced the value.
    if gone := removed_value_message(given.name, key, given.text):
        raise ConfigError(gone)
    return checked(SETTINGS[key].annotation, given.name, given.text)


def task_key(name: str, prefix: str) -> str | None:
    """Return the key of a task's field: `--task.image-size` and `TANDEM_TASK__IMAGE_SIZE` set image_size."""
    field = name.removeprefix(prefix).replace("-", "_")
    return f"task.{field}" if name.startswith(prefix) and field.isidentifier() else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    ours = {name: text for name, text in environ.items() if not _SERVICE_LINK.match(f"{name}={text}")}
    return _from_variables(ours, lambda name: (f"environment {name}", name))


def dotenv_variables(path: Path | None) -> Mapping[str, str | None]:
    """Return the variables in .env; empty if it does not exist. Raises ConfigError if it cannot be read."""
    try:
        if path is None or not path.is_file():
            return {}
        # Import it here, because most directories have no .env.
        from dotenv.parser import parse_stream

        # Only the parser, because the rest of the package skips a line that it cannot parse.
        with path.open(encoding="utf-8-sig") as file:
            lines = list(parse_stream(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; fix its permissions or encoding, or move it away"
        ) from error
    for line in lines:
        # Lines of other programs may have another syntax.
        if line.error and _OF_TANDEM.search(line.original.string):
            raise ConfigError(
                f"line {_first_line_of(line.original)} of {path} is not a variable; expected "
                "TANDEM_NAME=VALUE, with a quote at both ends of the value or at none"
            )
    return {line.key: line.value for line in lines if line.key is not None}


def _first_line_of(original: "Original") -> int:
    """Return the number of the first line that is not empty: the parser counts empty ones before it."""
    text = original.string
    return original.line + text[: len(text) - len(text.lstrip())].count("\n")


def _from_variables(
    variables: Mapping[str, str | None], describe: Callable[[str], tuple[str, str]]
) -> dict[str, Given]:
    """Collect tandem's variables. An empty one counts as not set: Compose creates those from `${X:-}`."""
    given: dict[str, Given] = {}
    # Sort them, so that the same mistake is reported first each time.
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        source, label = describe(name)
        key = "config" if name == PREFIX + "CONFIG" else VARIABLES.get(name) or task_key(name, TASK_PREFIX)
        if key is None and name not in OTHER_VARIABLES:
            if gone := removed_name_message("variable", name, label):
                # An old Compose file still passes the removed variable empty, which is harmless.
                if not variables[name]:
                    continue
                raise ConfigError(gone)
            raise unknown("variable", name, [*VARIABLES, *OTHER_VARIABLES], label)
        text = variables[name]
        if key is not None and text:
            # Task fields are lowercase, and variables are uppercase by convention.
            given[key.lower()] = Given(text, source, label)
    return given


def _from_file(config: Given, other_names: Collection[str]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return the values in the file, and messages about ignored parts; `other_names`: other sources' keys."""
    try:
        table = _table_in(config.text)
    # RecursionError: tomllib and json recurse into nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{config.name}: invalid value {config.text!r}; expected {CONFIG_VALID}: {reason}"
        ) from error
    notes: tuple[str, ...] = ()
    if not _is_of_a_run(config.text):
        table = _without_sections(table, config.text)
    task_fields = table.pop("task_fields", None)
    task_fields = {} if task_fields is None else task_fields
    if not isinstance(task_fields, dict):
        bad_value(f"task_fields in {config.text}", task_fields, "a table")
    if _is_of_a_run(config.text):
        table, notes = _of_a_run(translated(table), config.text, other_names)
    for key in table:
        if key not in FIELDS:
            if gone := removed_name_message("key", key, f"{key} in {config.text}"):
                raise ConfigError(gone)
            raise unknown("key", key, [*FIELDS, *SLICES, "task_fields"], f"{key} in {config.text}")
    given: dict[str, Given] = {}
    for key, value in (table | {f"task.{name}": value for name, value in task_fields.items()}).items():
        label = f"{key} in {config.text}"
        # JSON's null and YAML's ~ mean "none", which is a value and overrides a default.
        if value is None and key in SETTINGS:
            value = "none"
        if not isinstance(value, str | bool | int | float):
            bad_value(label, value, SETTINGS[key].valid if key in SETTINGS else TASK_VALID)
        given[key] = Given(plain(value), f"config {config.text}", label)
    return given, notes


def _of_a_run(
    table: Mapping[str, Any], file: str, other_names: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of a run's config.json that apply to another run, and messages about the rest.

    Null becomes the text "none". The file contains every setting, so a default counts as not set.
    `other_names`: the keys given by other sources.
    """
    default = Settings().to_dict()
    kept = {
        key: "none" if value is None else value
        for key, value in table.items()
        # Unknown keys are only reported: another version of tandem may have written the file.
        if key in FIELDS and key not in PLACES and value != default[key]
    }
    ignored = [key for key in PLACES if table.get(key) is not None and key not in other_names]
    other = sorted(table.keys() - set(FIELDS))
    notes = []
    if ignored:
        notes.append(f"{file}: ignoring the other run's paths and addresses: {', '.join(ignored)}")
    if other:
        notes.append(f"{file}: ignoring settings unknown to this version: {', '.join(other)}")
    return kept, tuple(notes)


# Read a `--config` file: TOML, YAML, or the config.json of a run, with sections or flat keys.
#
# A section has the name of a group of settings (`tandem help settings`): `[data]` contains `batch_size`. This
# part checks only the position of a key; `_from_file` checks the key itself.

NULLS = ("", "~", "null", "Null", "NULL")
DEEPEST = 4
"""Limit on the nesting of a YAML file; a valid one has at most three levels."""


def _table_in(path: str) -> dict[str, Any]:
    """Parse a file by its suffix. YAML scalars stay text, and null is None. Raises OSError and ValueError."""
    text = Path(path).read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    if _is_of_a_run(path):
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


def _is_of_a_run(path: str) -> bool:
    return path.endswith(".json")


def _without_sections(table: Mapping[str, Any], file: str) -> dict[str, Any]:
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
    if isinstance(node, ScalarNode):
        # A quoted "null" has a style, and is text.
        return None if node.style is None and node.value in NULLS else node.value
    if not isinstance(node, MappingNode):
        return [_value_of(each, depth - 1) for each in node.value]
    table: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key.value, str):
            raise ValueError(f"line {line} has a key that is not a name")
        # YAML forbids repeated keys, but PyYAML keeps the last one silently.
        if key.value in table:
            raise ValueError(f"line {line} sets {key.value} again")
        table[key.value] = _value_of(value, depth - 1)
    return table
