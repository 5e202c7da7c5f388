"""`tandem help TOPIC` for a setting, a group of settings, or exit codes. Verbs have their own help."""

from tandem.config.fields import Setting, plain
from tandem.config.removed import instead_of
from tandem.config.settings import SETTINGS, SLICES
from tandem.config.sources import PREFIX
from tandem.errors import ConfigError
from tandem.text import did_you_mean, nearest

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
    # Before settings: `metrics` is a group and a setting, and the group's text contains the setting's.
    if topic in SLICES:
        group = [setting for setting in SETTINGS.values() if setting.slice == topic]
        return f"{SLICES[topic].__doc__}\n\n" + "\n".join(map(_about, group))
    if name in SETTINGS:
        return _about(SETTINGS[name])
    if gone := instead_of("flag", "--" + name.replace("_", "-")):
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
