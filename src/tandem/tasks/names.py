"""What a task is called on the command line: one of ours, a file's class, or a module's. Imports no torch."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from tandem.errors import ConfigError

BUILT_IN: Mapping[str, str] = {
    "digits": "tandem.tasks.digits:Digits",
    "mnist": "tandem.tasks.mnist:Mnist",
    "fashion-mnist": "tandem.tasks.mnist:FashionMnist",
    "cifar10": "tandem.tasks.cifar10:Cifar10",
    "image-folder": "tandem.tasks.image_folder:ImageFolder",
}
VALID = f"valid are {', '.join(BUILT_IN)}, PATH/FILE.py:CLASS and PACKAGE.MODULE:CLASS"


class TaskName(NamedTuple):
    """Where a task's class is looked for; no class: the only one there is meant."""

    text: str
    location: str
    class_name: str

    @property
    def is_file(self) -> bool:
        return self.location.endswith(".py")


def parsed(name: str) -> TaskName:
    """Raises ConfigError for what is no task's name, and for a file that does not exist."""
    text = BUILT_IN.get(name, name)
    location, _, class_name = text.rpartition(":") if ":" in text else (text, "", "")
    found = TaskName(text, location, class_name)
    if found.is_file and not Path(location).is_file():
        raise ConfigError(f"task file {location} does not exist (from {Path.cwd()}): give PATH/FILE.py:CLASS")
    if not (found.is_file or class_name or "." in location):
        near = get_close_matches(text, BUILT_IN, n=1)
        meant = f", did you mean {near[0]!r}" if near else ""
        raise ConfigError(f"unknown task {text!r}{meant}: {VALID}")
    return found
