"""Format settings for users: `config`, `config --explain`, and the tables in the docs."""

import json
import re
from collections.abc import Collection

from tandem.config.fields import Setting, plain
from tandem.config.removed import removed_name_message
from tandem.config.settings import SETTINGS, SLICES, Settings
from tandem.config.sources import CONFIG_HELP, CONFIG_VALID, FIELDS, PREFIX, Loaded
from tandem.errors import ConfigError
from tandem.text import did_you_mean, nearest

TABLE_HEAD = ("| flag | variable | default | valid | meaning |", "|---|---|---|---|---|")


def explain(loaded: Loaded) -> str:
    """Return a table with the name, value and source of every setting."""
    settings = loaded.settings
    rows = [(name, plain(settings.value(name)), loaded.sources[name]) for name in FIELDS]
    for name, text in settings.run.task_fields.items():
        rows.append((f"task.{name}", text, loaded.sources[f"task.{name}"]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def as_toml(settings: Settings, chosen: Collection[str] = ()) -> str:
    """Return a file for `--config`: a section per group, with defaults as comments unless `chosen`."""
    default = Settings()
    lines = ["# Settings of tandem. A line that starts with # shows a default."]
    for slice_name, model in SLICES.items():
        lines += ["", f"[{slice_name}]  # {model.__doc__}"]
        for name in FIELDS:
            if SETTINGS[name].slice == slice_name:
                value = settings.value(name)
                is_set = name in chosen or value != default.value(name)
                # A default stays a comment, so that the file follows a later version's defaults.
                lines.append(f"{'' if is_set else '# '}{name} = {_toml(value)}")
    lines += ["", "[task_fields]  # Settings of the task"]
    for name, text in settings.run.task_fields.items():
        lines.append(f"{name if re.fullmatch('[A-Za-z0-9_-]+', name) else _toml(name)} = {_toml(text)}")
    return "\n".join(lines) + "\n"


def as_json(loaded: Loaded) -> dict[str, object]:
    """Return what `tandem config --json` prints: the value and the source of every setting."""
    values = {name: value for name, value in loaded.settings.to_dict().items() if name in FIELDS}
    values |= {f"task.{name}": text for name, text in loaded.settings.run.task_fields.items()}
    return {
        "settings": {
            name: {"value": value, "source": loaded.sources[name]} for name, value in values.items()
        },
        "notes": list(loaded.notes),
    }


def _toml(value: object) -> str:
    if isinstance(value, bool | int | float):
        return plain(value)
    # JSON strings are TOML basic strings, except that TOML forbids a raw DEL character.
    return json.dumps(plain(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def markdown() -> str:
    """Return the tables of docs/configuration.md: flags, variables, defaults, values and meanings."""
    lines = []
    for slice_name, model in SLICES.items():
        lines += [f"## {model.__doc__}", *TABLE_HEAD]
        for setting in SETTINGS.values():
            if setting.slice == slice_name:
                named = [setting.flag, setting.variable, plain(setting.default)]
                shown = [f"`{name}`" if name else "" for name in named]
                lines.append(f"| {' | '.join([*shown, setting.valid, setting.description])} |")
        lines.append("")
    lines += ["## Settings file", *TABLE_HEAD]
    lines.append(f"| `--config` | `TANDEM_CONFIG` |  | {CONFIG_VALID} | {CONFIG_HELP} |")
    return "\n".join(lines) + "\n"


# `tandem help TOPIC` for a setting, a group of settings, or exit codes. Verbs have their own help.

EXIT_CODES = """\
Exit codes of a run; what to do about each one: docs/troubleshooting.md

  0     finished
  1     an error in the task, a NaN or infinity, or failed saves; not restarted
  2     invalid configuration, or a mistake in the task; not restarted
  130   a second Ctrl-C
  134   a GPU failed; restarted
  137   killed, or stopped before a checkpoint could be written (also other codes 128+n); restarted
  143   stopped by a signal after saving a checkpoint; run the same command to resume
  200   a peer was lost, a rank hung, or the restart budget is used up; restarted
"""
PRECEDENCE = """\
Highest precedence first: a flag (--epochs 3), a variable (TANDEM_EPOCHS=3), .env, a key in a --config file.
`tandem config --explain` shows every value and where it came from; `tandem launch --help` lists all settings.

Groups, for `tandem help GROUP` and as sections of a --config file: {groups}
"""
TOPICS = {"exit-codes": EXIT_CODES}


def topics() -> list[str]:
    """Return all topics except verbs and single settings."""
    return ["settings", *TOPICS, *SLICES]


def help_on(topic: str, verbs: list[str]) -> str:
    """Return the text of a topic other than a verb. Raises ConfigError with the nearest match."""
    name = topic.removeprefix("--").removeprefix(PREFIX).lower().replace("-", "_")
    # A user who saw `exit code 143` asks for `tandem help 143`.
    if topic in TOPICS or topic.isdigit():
        return TOPICS["exit-codes"]
    if topic == "settings":
        return PRECEDENCE.format(groups=", ".join(SLICES))
    # Check groups before settings: `metrics` is both, and the group's text contains the setting's.
    if topic in SLICES:
        group = [setting for setting in SETTINGS.values() if setting.slice == topic]
        return f"{SLICES[topic].__doc__}\n\n" + "\n".join(map(_about, group))
    if name in SETTINGS:
        return _about(SETTINGS[name])
    if gone := removed_name_message("flag", "--" + name.replace("_", "-")):
        raise ConfigError(gone)
    known = [*verbs, *topics(), *(setting.flag[2:] for setting in SETTINGS.values())]
    near = nearest(topic.removeprefix("--"), known)
    hint = did_you_mean(near and f"`tandem help {near}`", "; see `tandem --help`")
    raise ConfigError(
        f"no help on {topic!r}; expected a verb, a setting such as epochs, or {', '.join(topics())}{hint}"
    )


def _about(setting: Setting) -> str:
    default = plain(setting.default)
    return (
        f"{setting.flag}: {setting.description}\n"
        f"  default {default or 'none'}; valid: {setting.valid}\n"
        f"  {setting.variable} in the environment and .env, {setting.name} in a --config file\n"
    )
