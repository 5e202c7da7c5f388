"""Name commands and options as the user types them: make's targets and variables, or `tandem cluster`.

Messages are written with make's words. `tandem cluster` translates them in one place.
"""

import re

OPTIONS = (
    "PROJECT", "NODES", "SPARES", "TASK", "SCRIPT", "SCRIPT_ARGS", "ARGS", "EPOCHS", "RUN", "GPUS", "RATE",
    "LATENCY", "LOSS", "METRICS_PORT", "MONITORING", "IMAGE", "VOLUMES", "TO", "NODE",
)  # fmt: skip
"""make's variables that are options of `tandem cluster`; MEMORY and others are environment variables."""
_COMMAND = re.compile(r"\bmake (?:compose-([a-z]+)|(chaos) FAULT=(\S+))")
_SWITCH = re.compile(r"(?<![\w/.'\"-])(VOLUMES|MONITORING)=1\b")
_OPTION = re.compile(rf"(?<![\w/.'\"-])({'|'.join(OPTIONS)})\b(=?)")


class Wording:
    """How messages name commands. `is_make` is False once `tandem cluster` was typed."""

    is_make = True


def typed(text: str) -> str:
    """Return the message with the words of the command line that the user typed."""
    if Wording.is_make:
        return text
    text = _COMMAND.sub(lambda found: f"tandem cluster {found[1] or f'chaos {found[3]}'}", text)
    text = _SWITCH.sub(lambda found: _flag(found[1]), text)
    return _OPTION.sub(lambda found: _flag(found[1]) + (" " if found[2] == "=" else ""), text)


def say(text: str) -> None:
    """Print the message at once."""
    print(typed(text), flush=True)


def _flag(name: str) -> str:
    return "--" + name.lower().replace("_", "-")
