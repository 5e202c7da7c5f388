"""Names of tasks on the command line: a built-in one, or a class of a file or module. No torch import."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from tandem.config.sources import Loaded
from tandem.errors import ConfigError
from tandem.log import printable
from tandem.text import did_you_mean, nearest

BUILT_IN: Mapping[str, str] = {
    "digits": "tandem.tasks.digits:Digits",
    "mnist": "tandem.tasks.classification:Mnist",
    "fashion-mnist": "tandem.tasks.classification:FashionMnist",
    "cifar10": "tandem.tasks.classification:Cifar10",
    "image-folder": "tandem.tasks.image_folder:ImageFolder",
}
LONGEST = 400
VALID = f"expected {', '.join(BUILT_IN)}, PATH/FILE.py:CLASS or PACKAGE.MODULE:CLASS"


class TaskName(NamedTuple):
    """The location of a task's class; without a class name, it is the only one there."""

    text: str
    location: str
    class_name: str

    @property
    def is_file(self) -> bool:
        return self.location.endswith(".py")


def is_script(name: str) -> bool:
    """Return True if a run's task is a script: no task can have such a name."""
    return name not in BUILT_IN and not name.endswith(".py") and ":" not in name and "." not in name


def parsed(name: str) -> TaskName:
    """Parse a task's name. Raises ConfigError for an invalid name, and for a file that does not exist."""
    text = BUILT_IN.get(name, name)
    # Split at the last colon, because a path may contain one.
    location, _, class_name = text.rpartition(":") if ":" in text else (text, "", "")
    found = TaskName(text, location, class_name)
    if found.is_file and not Path(location).is_file():
        raise ConfigError(
            f"task file {location} does not exist (looked from {Path.cwd()}); expected PATH/FILE.py:CLASS"
        )
    if not (found.is_file or class_name or "." in location):
        raise ConfigError(f"unknown task {text!r}{did_you_mean(nearest(text, BUILT_IN), ';')} {VALID}")
    return found


def code_of(name: str) -> list[Path]:
    """Return the files whose code runs when a task is imported; empty for a built-in or unknown task.

    Nothing is imported to find them. Raises ConfigError like `parsed`.
    """
    asked = parsed(name)
    if asked.is_file:
        return [Path(asked.location).absolute()]
    return [] if asked.location.partition(".")[0] == "tandem" else list(_modules(asked.location))


def _modules(location: str) -> Iterator[Path]:
    """Yield the files of a module and the packages that contain it, the module's own last."""
    path: list[str] | None = None
    parts = location.split(".")
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        # The current directory is added last, as an import of the task would search it.
        where = [*sys.path, str(Path.cwd())] if path is None else path
        # Do not use importlib.util.find_spec, which imports the parent packages and so runs their code.
        found = (finder.find_spec(name, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        if (spec := next((each for each in found if each is not None), None)) is None:
            return
        # A namespace package and a built-in module have no file.
        if spec.origin is not None and spec.has_location:
            yield Path(spec.origin).absolute()
        path = list(spec.submodule_search_locations or [])


def describe_task_code(name: str, who: str, run_dir: PurePath | None) -> str:
    """Return a message about the files that will run, if the user did not type the task's name.

    It is "" for a built-in task. `who`: the source of the name, such as a checkpoint. Raises ConfigError if
    the code is in `run_dir`, which may come from someone else: an archive of a run must not be able to run
    code.
    """
    files = code_of(name)
    if not files:
        return ""
    _, _, class_name = name.rpartition(":") if ":" in name else ("", "", "")
    # The name is from a file that someone else may have written, so it is cut and escaped for the terminal.
    what = printable(f"task {class_name or name} from {files[-1]}", LONGEST)
    if isinstance(run_dir, Path) and any(_is_in(file, run_dir) for file in files):
        raise ConfigError(
            f"{who} names {what}, which is in the run directory and would run the code stored there; "
            f"if you trust it, add --task {name}"
        )
    return f"importing {what}, named by {who}; use --task to choose another"


def _is_in(file: Path, folder: Path) -> bool:
    here = folder.resolve()
    # Both the link and its target count: either can put code of the run directory on the path.
    return any(each.is_relative_to(here) for each in (file.parent.resolve() / file.name, file.resolve()))


def untyped_task_note(loaded: Loaded) -> str:
    """Return `describe_task_code` for a launch whose task a file names; "" if a flag or variable does."""
    source = loaded.sources["task"]
    if source.startswith(("flag", "environment", "argument")) or source == "default":
        return ""
    file = Path(source.removeprefix("config "))
    return describe_task_code(
        loaded.settings.run.task, str(file), file.parent if file.suffix == ".json" else None
    )
