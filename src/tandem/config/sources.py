"""The sources of values: flags > environment TANDEM_* > .env > --config FILE > defaults.

Compose has the same order, because it makes .env part of the environment.

All sources provide text (`Given`), the one with the highest precedence wins, and only winning values are
converted. An unknown name is an error with the nearest match, so that a typo cannot silently train with a
default.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.fields import plain
from tandem.config.files import is_of_a_run, table_in, without_sections
from tandem.config.removed import removed_name_message, removed_value_message, translated
from tandem.config.settings import SETTINGS, SLICES, Settings, bad_value, checked, unknown
from tandem.errors import ConfigError

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
        from dotenv import dotenv_values

        return dotenv_values(path, interpolate=False)  # interpolation would read os.environ
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; fix its permissions or encoding, or move it away"
        ) from error


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
        table = table_in(config.text)
    # RecursionError: tomllib and json recurse into nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{config.name}: invalid value {config.text!r}; expected {CONFIG_VALID}: {error}"
        ) from error
    notes: tuple[str, ...] = ()
    if not is_of_a_run(config.text):
        table = without_sections(table, config.text)
    task_fields = table.pop("task_fields", None)
    task_fields = {} if task_fields is None else task_fields
    if not isinstance(task_fields, dict):
        bad_value(f"task_fields in {config.text}", task_fields, "a table")
    if is_of_a_run(config.text):
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
