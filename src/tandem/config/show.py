"""Settings for people: the table of `config --explain` and that of the docs."""

from tandem.config.sources import BY_NAME, FIELDS, Loaded


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def explain(loaded: Loaded) -> str:
    """A table for people: name, value and source of every setting."""
    settings = loaded.settings
    rows = [(name, _shown(settings.value(name)), loaded.sources[name]) for name in FIELDS]
    for name, text in settings.run.task_fields.items():
        rows.append((f"task.{name}", text, loaded.sources[f"task.{name}"]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def markdown_table() -> str:
    """The table of docs/configuration.md: every flag, its variable, default, valid values and meaning."""
    lines = ["| flag | variable | default | valid | meaning |", "|---|---|---|---|---|"]
    for setting in BY_NAME.values():
        flag = setting.flag
        cells = [f"`{flag}`", f"`{setting.variable}`", f"`{_shown(setting.default)}`", setting.valid]
        lines.append(f"| {' | '.join(cells)} | {setting.description} |")
    lines.append("| `--task.NAME` | `TANDEM_TASK__NAME` | | text | the task's own settings |")
    lines.append("| `--config` | `TANDEM_CONFIG` | | a TOML file | `name = value` lines, `[task_fields]` |")
    return "\n".join(lines) + "\n"
