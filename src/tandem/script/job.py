"""Describe a user's program, and what its ranks need to know. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

FUNCTION = "tandem.script.function"
"""The module that runs a function of `tandem.launch`; its argument is a file with the function's name."""


@dataclass(frozen=True)
class Program:
    """The words after tandem's own settings: `train.py`, `-m module` or `-- command`, with arguments."""

    kind: Literal["script", "module", "command"]
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of a run of this program."""
        if self.target == FUNCTION and self.arguments:
            return PurePath(self.arguments[0]).stem
        return self.target.rpartition(".")[2] if self.kind == "module" else PurePath(self.target).stem

    def words(self) -> list[str]:
        """Return the words that give this program on another `tandem launch` command line."""
        marks = {"script": [], "module": ["-m"], "command": ["--"]}[self.kind]
        return [*marks, self.target, *self.arguments]

    def __str__(self) -> str:
        return self.target if self.kind != "module" else f"-m {self.target}"


@dataclass(frozen=True)
class Job:
    """The program, and what holds for all its ranks on this node.

    `logs`: the directory of the ranks' logs. `variables`: the settings that were given, as TANDEM_ variables.
    `hang_timeout`: seconds, or None to derive it from the step time. `patience`: seconds that a start, an
    evaluation or a save may take. `cold`: each rank is a new interpreter.
    """

    program: Program
    logs: str
    variables: Mapping[str, str]
    max_restarts: int
    hang_timeout: float | None
    patience: float
    json_lines: bool
    cold: bool


def problem_of_script(path: Path) -> str | None:
    """Return why this file cannot be run as a script, as a sentence, or None if it can."""
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}; make it readable"
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"{path}{line} is not Python: {error.msg if isinstance(error, SyntaxError) else error}"
    return None
