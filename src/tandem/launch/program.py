"""Split `tandem launch [settings] PROGRAM [arguments]` into tandem's words and the user's program."""

import ast
import importlib.machinery
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tandem.config import SETTINGS, Given, Settings
from tandem.config.fields import words_in
from tandem.errors import ConfigError
from tandem.run.directory import RunDir
from tandem.script.job import Job, Program, problem_of_script
from tandem.tasks.names import BUILT_IN

TASK = re.compile(r"[^-].*\.py:[A-Za-z_]\w*")
SEE = "See `tandem launch --help`"
_SWITCHES = {
    setting.flag: ("true", "false", "none", *words_in(setting.annotation))
    for setting in SETTINGS.values()
    if setting.is_switch
}
"""Flags that need no value, with the words that are a value if they follow."""
_ALONE = ("-h", "--help", "-v", "--verbose", "-q", "--quiet", "--json")


def split(words: Sequence[str]) -> tuple[list[str], Program | None]:
    """Return (tandem's own words, the program after them); None as program means that a task is trained.

    The program begins with the first word that is neither a setting nor a setting's value, with `-m`, or with
    `--`. Everything after it belongs to the program. `FILE.py:CLASS` is a task, and settings may follow it.
    Raises ConfigError.
    """
    index = 0
    while index < len(words):
        word, ours = words[index], list(words[:index])
        if word in ("-m", "--"):
            rest = words[index + 1 :]
            if not rest:
                raise ConfigError(f"{word} needs a {'module' if word == '-m' else 'command'} after it. {SEE}")
            return ours, Program("module" if word == "-m" else "command", rest[0], tuple(rest[1:]))
        # A script's file name may contain a colon.
        if TASK.fullmatch(word) and not Path(word).exists():
            return [*ours, "--task", word, *words[index + 1 :]], None
        if not word.startswith("-"):
            return ours, Program("script", word, tuple(words[index + 1 :]))
        index += 1 + takes_next(word, words[index + 1 : index + 2])
    return list(words), None


def takes_next(flag: str, following: Sequence[str]) -> bool:
    """Return whether the word after `flag` is its value."""
    if "=" in flag or flag.startswith("--no-") or flag in _ALONE:
        return False
    return flag not in _SWITCHES or (bool(following) and following[0] in _SWITCHES[flag])


def to_verify(script: str | None, program: Program | None, flags: Mapping[str, Given]) -> Program | None:
    """Return what `tandem verify-resume` runs, None for a task; `script` is the value of --script.

    After `--script FILE`, the script's own arguments follow `--`. Raises ConfigError.
    """
    verb = "tandem verify-resume"
    if script is not None:
        own = () if program is None else (program.target, *program.arguments)
        if program is not None and program.kind != "command":
            raise ConfigError(
                f"unexpected argument {own[0]!r} after --script {script}; put the script's arguments after "
                f"it: {verb} [settings] {script} ARGUMENTS"
            )
        program = Program("script", script, own)
    elif program is not None and program.kind == "command":
        raise ConfigError(
            f"-- {program.target}: {verb} runs a script or a task, not a command; "
            f"use {verb} [settings] train.py ARGUMENTS"
        )
    if program is None:
        return None
    try:
        check(program, flags)
    except ConfigError as error:
        raise ConfigError(str(error).replace("tandem launch", verb)) from None
    return program


def is_own_loop(path: Path) -> bool:
    """Return whether a file is a script that calls tandem.start() and defines no task."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = {ast.unparse(each.func) for each in nodes if isinstance(each, ast.Call)}
    is_task = any(isinstance(each, ast.ClassDef) and _is_task(each) for each in nodes)
    return "tandem.start" in calls and not is_task


def check(program: Program, flags: Mapping[str, Given]) -> None:
    """Reject a program that cannot start, before anything does. Raises ConfigError with one line."""
    tasks = [given.name for key, given in flags.items() if key == "task" or key.startswith("task.")]
    if tasks:
        raise ConfigError(f"{tasks[0]} names a task, but {program} is a program; give only one of them")
    if program.kind == "script":
        _check_script(Path(program.target))
    elif program.kind == "module":
        top = program.target.partition(".")[0]
        # Looking up a submodule would import its parent package, so only the top level is checked.
        if not top or importlib.machinery.PathFinder.find_spec(top) is None:
            if not Path(top).with_suffix(".py").is_file() and not Path(top or "/").is_dir():
                raise ConfigError(f"-m {program.target}: no module {top!r} found here. {SEE}")
    elif shutil.which(program.target) is None:
        raise ConfigError(f"-- {program.target}: command not found. {SEE}")


def _check_script(path: Path) -> None:
    if not path.exists():
        hint = "give the path of a script; settings are flags such as --epochs 4"
        if str(path) in BUILT_IN:
            hint = f"for the built-in task use --task {path}"
        raise ConfigError(f"no script {path} found in {Path.cwd()}; {hint}. {SEE}")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; expected a script file; for a package use -m {path.name}")
    problem = problem_of_script(path)
    if problem:
        more = f"; to run another kind of program use -- ./{path}" if "not Python" in problem else ""
        raise ConfigError(problem + more)
    if name := _only_task(path):
        raise ConfigError(f"{path} only defines the task {name}; run `tandem launch {path}:{name}`")


def _only_task(path: Path) -> str | None:
    """Return the name of the only task that a file defines, if the file does nothing else."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tasks = [each.name for each in body if isinstance(each, ast.ClassDef) and _is_task(each)]
    quiet = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
    is_quiet = all(
        isinstance(each, quiet) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in body
    )
    return tasks[0] if is_quiet and len(tasks) == 1 else None


def _is_task(found: ast.ClassDef) -> bool:
    return {"build_model", "loss"} <= {each.name for each in found.body if isinstance(each, ast.FunctionDef)}


def job_of(program: Program, run: RunDir, settings: Settings, chosen: Collection[str]) -> Job:
    """Return what the ranks of this node need to run the program; `chosen` as for `variables_of`."""
    hang = settings.reliability.hang_timeout
    return Job(
        program=program,
        logs=str(run.logs),
        variables=variables_of(settings, chosen),
        max_restarts=settings.launch.max_restarts,
        hang_timeout=None if hang == "auto" else float(hang),
        patience=settings.reliability.phase_timeout,
        json_lines=settings.telemetry.log_format == "json",
        cold=settings.launch.fresh_interpreter,
    )


def variables_of(settings: Settings, chosen: Collection[str]) -> dict[str, str]:
    """Return settings as variables for a program that uses tandem: the chosen ones and the run directory.

    Leaves out the task, because there is none, and what belongs to the agent: nodes, ranks and the metrics
    page.
    """
    texts = settings.to_dict()
    ours = {name for name, setting in SETTINGS.items() if setting.slice in ("launch", "metrics")}
    names = {*chosen, "run_dir", "resume"} & (SETTINGS.keys() - ours - {"task", "task_fields"})
    return {SETTINGS[name].variable: text_of_setting(texts[name]) for name in sorted(names)}


def text_of_setting(value: object) -> str:
    """Return a setting's value as text, as a variable or a flag has it."""
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
