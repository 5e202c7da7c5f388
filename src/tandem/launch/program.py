"""`tandem launch [settings] PROGRAM [its arguments]`: where ours ends and a person's own program begins."""

import importlib.machinery
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tandem.config import SETTINGS, Given, Settings
from tandem.errors import ConfigError
from tandem.script.job import Job, Program, problem_of_script

SEE = "See `tandem launch --help`"
_SWITCHES = {setting.flag for setting in SETTINGS.values() if setting.is_switch}
_SWITCH_WORDS = ("true", "false")


def split(words: Sequence[str]) -> tuple[list[str], Program | None]:
    """(tandem's own words, the program after them); None where there is none, and a task is trained.

    The program begins with the first word that is neither a setting nor a setting's value, with `-m` or with
    `--`; everything after that is its own, whatever it looks like. Raises ConfigError.
    """
    index = 0
    while index < len(words):
        word, ours = words[index], list(words[:index])
        if word in ("-m", "--"):
            rest = words[index + 1 :]
            if not rest:
                raise ConfigError(f"{word} needs a {'module' if word == '-m' else 'command'} after it. {SEE}")
            return ours, Program("module" if word == "-m" else "command", rest[0], tuple(rest[1:]))
        if not word.startswith("-"):
            return ours, Program("script", word, tuple(words[index + 1 :]))
        index += 1 + _takes_next(word, words[index + 1 : index + 2])
    return list(words), None


def _takes_next(flag: str, following: Sequence[str]) -> bool:
    """Whether the word after `flag` is its value."""
    if "=" in flag or flag.startswith("--no-") or flag in ("-h", "--help"):
        return False
    return flag not in _SWITCHES or (bool(following) and following[0] in _SWITCH_WORDS)


def check(program: Program, flags: Mapping[str, Given]) -> None:
    """Refuse what cannot start before anything does. Raises ConfigError, one line."""
    tasks = [given.name for key, given in flags.items() if key == "task" or key.startswith("task.")]
    if tasks:
        raise ConfigError(f"{tasks[0]} names a task, and {program} is a program of its own; give one of them")
    if program.kind == "script":
        _check_script(Path(program.target))
    elif program.kind == "module":
        top = program.target.partition(".")[0]
        if not top or importlib.machinery.PathFinder.find_spec(top) is None:
            if not Path(top).with_suffix(".py").is_file() and not Path(top or "/").is_dir():
                raise ConfigError(f"-m {program.target}: there is no module {top!r} here. {SEE}")
    elif shutil.which(program.target) is None:
        raise ConfigError(f"-- {program.target}: there is no such command here. {SEE}")


def _check_script(path: Path) -> None:
    if not path.exists():
        hint = f"a built-in task is --task {path}" if path.suffix != ".py" else "give the path of a script"
        raise ConfigError(f"there is no script {path} in {Path.cwd()}; {hint}. {SEE}")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, and a script is a file; for a package: -m {path.name}")
    problem = problem_of_script(path)
    if problem:
        more = f"; for another kind of program: -- ./{path}" if "not Python" in problem else ""
        raise ConfigError(problem + more)


def job_of(program: Program, settings: Settings, chosen: Collection[str]) -> Job:
    """What the ranks of this node need to know; `chosen` as for `variables_of`."""
    hang = settings.reliability.hang_timeout
    return Job(
        program=program,
        run_dir=str(settings.run.run_dir),
        variables=variables_of(settings, chosen),
        max_restarts=settings.launch.max_restarts,
        hang_timeout=None if hang == "auto" else float(hang),
        patience=settings.reliability.first_step_timeout,
        json_lines=settings.telemetry.log_format == "json",
        cold=settings.launch.cold,
    )


def variables_of(settings: Settings, chosen: Collection[str]) -> dict[str, str]:
    """The settings as variables, for a program that asks for them: those that were `chosen`, with whatever
    value, and where the run writes.

    Not the task, which there is none of, nor what is the agent's: nodes and ranks, and the metrics page.
    """
    texts = settings.to_dict()
    ours = {name for name, setting in SETTINGS.items() if setting.slice in ("launch", "metrics")}
    names = {*chosen, "run_dir", "resume"} & (SETTINGS.keys() - ours - {"task", "task_fields"})
    return {SETTINGS[name].variable: _text(texts[name]) for name in sorted(names)}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
