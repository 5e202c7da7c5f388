"""Split `tandem launch [settings] PROGRAM [arguments]` into tandem's words and the user's program.

Words after a program belong to it, as under torchrun. A script may have a flag of the same name as a setting,
so nothing is moved. A script that rejects a flag of tandem gets a hint (`hint`). Flags before a plain script
get a warning if they only concern tasks and custom loops (`without_effect`).
"""

import ast
import importlib.machinery
import os
import pkgutil
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from tandem.config import SETTINGS, Given
from tandem.config.arguments import FLAGS
from tandem.config.fields import words_in
from tandem.config.removed import TORCHRUN
from tandem.config.task_names import BUILT_IN
from tandem.errors import ConfigError
from tandem.script.job import Program, problem_of_script
from tandem.text import did_you_mean, nearest

TASK = re.compile(r"[^-].*\.py:[A-Za-z_]\w*")
LAUNCH = "tandem launch"
SEE = f"See `{LAUNCH} --help`"
_SWITCHES = {
    setting.flag: ("true", "false", "none", *words_in(setting.annotation))
    for setting in SETTINGS.values()
    if setting.is_switch
}
"""Flags that need no value, with the words that are a value if they follow."""
LONGEST_FIRST_LINE = 256
"""The kernel reads no more of a script's first line (execve(2))."""
TORCHRUN_SWITCHES = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
_ALONE = ("-h", "--help", "-v", "--verbose", "-q", "--quiet", "--json")


def split(words: Sequence[str], verb: str = LAUNCH) -> tuple[list[str], Program | None]:
    """Return (tandem's own words, the program after them); None as program means that a task is trained.

    The program begins with the first word that is neither a setting nor a setting's value, with `-m`, or with
    `--`. Everything after it belongs to the program. `FILE.py:CLASS` is a task, and settings may follow it.
    `verb` is the command to name in messages. Raises ConfigError.
    """
    index = 0
    while index < len(words):
        word = words[index]
        ours = list(words[:index])
        if word in ("-m", "--"):
            rest = words[index + 1 :]
            if not rest:
                kind = "module" if word == "-m" else "command"
                raise ConfigError(f"{word} needs a {kind} after it. See `{verb} --help`")
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
    if program is not None:
        check(program, flags, verb)
    return program


def is_custom_loop(path: Path) -> bool:
    """Return whether a file is a script that calls tandem.start() and defines no task."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = {ast.unparse(each.func) for each in nodes if isinstance(each, ast.Call)}
    is_task = any(isinstance(each, ast.ClassDef) and _is_task(each) for each in nodes)
    return "tandem.start" in calls and not is_task


def check(program: Program, flags: Mapping[str, Given], verb: str = LAUNCH) -> None:
    """Reject a program that cannot start, before anything does. Raises ConfigError with one line.

    `verb` is the command to name in messages.
    """
    see = f"See `{verb} --help`"
    tasks = [given.name for key, given in flags.items() if key == "task" or key.startswith("task.")]
    if tasks:
        raise ConfigError(f"{tasks[0]} names a task, but {program} is a program; give only one of them")
    if program.kind == "script":
        _check_script(Path(program.target), verb, see)
    elif program.kind == "module":
        if Path(program.target).is_file():
            raise ConfigError(
                f"-m {program.target}: expected the name of a module; for a script omit -m. {see}"
            )
        top = program.target.partition(".")[0]
        # Looking up a submodule would import its parent package, so only the top level is checked.
        if not top or importlib.machinery.PathFinder.find_spec(top) is None:
            if not Path(top).with_suffix(".py").is_file() and not Path(top or "/").is_dir():
                near = nearest(top, (each.name for each in pkgutil.iter_modules([str(Path.cwd())])))
                raise ConfigError(
                    f"-m {program.target}: no module {top!r} found here{did_you_mean(near, '.')} {see}"
                )
    elif shutil.which(program.target) is None:
        file = Path(program.target)
        problem = "command not found"
        if file.is_file():
            is_ready = os.access(file, os.X_OK)
            hint = f"for the file here use -- ./{file}" if is_ready else f"type: chmod +x {file}"
            problem = f"{'not on PATH' if is_ready else 'not executable'}; {hint}"
        raise ConfigError(f"-- {program.target}: {problem}. {see}")
    elif missing := _missing_interpreter(Path(str(shutil.which(program.target)))):
        raise ConfigError(
            f"cannot execute {program.target}: No such file or directory: {missing}, which its first line "
            f"names; expected a program that is installed. {see}"
        )


def _missing_interpreter(path: Path) -> str:
    """Return the interpreter in the first line of an executable file if it does not exist; else ""."""
    try:
        with path.open("rb") as file:
            words = file.readline(LONGEST_FIRST_LINE).removeprefix(b"#!").split()
            file.seek(0)
            named = os.fsdecode(words[0]) if words and file.read(2) == b"#!" else ""
    except OSError:  # an executable need not be readable
        return ""
    return named if named and not Path(named).exists() else ""


def _check_script(path: Path, verb: str, see: str) -> None:
    if not path.exists():
        hint = "; give the path of a script; settings are flags such as --epochs 4."
        if str(path) in BUILT_IN:
            hint = f"; for the built-in task use --task {path}."
        elif near := nearest(path.name, (each.name for each in path.parent.glob("*.py"))):
            hint = did_you_mean(str(path.with_name(near)))
        elif verb == LAUNCH and shutil.which(str(path)):
            hint = f"; to run a command put -- before it: {verb} -- {path}."
        raise ConfigError(f"no script {path} found in {Path.cwd()}{hint} {see}")
    if path.is_dir():
        package = f"; for a package use -m {path.name}" if path.name.isidentifier() else ""
        raise ConfigError(f"{path} is a directory; expected a script file{package}")
    problem = problem_of_script(path)
    if problem:
        more = f"; to run another kind of program use -- ./{path}" if "not Python" in problem else ""
        raise ConfigError(problem + more)
    if name := _only_task(path):
        raise ConfigError(f"{path} only defines the task {name}; run `{verb} {path}:{name}`")


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


REJECTS = re.compile(r"unrecogni[sz]ed|no such option|unknown|unexpected", re.IGNORECASE)
"""Words with which argparse, click and others reject an unknown flag."""

TRAINING_SLICES = ("data", "optimization", "exchange", "evaluation", "checkpoint")
TRAINING_SETTINGS = ("epochs", "steps", "seed", "strategy", "sync_batchnorm", "precision", "compile")
"""Settings that tasks and custom loops read; a script without tandem does not."""
MOST_FILES = 200
"""Limit for the files next to a script that are searched for tandem."""


def without_effect(program: Program, flags: Mapping[str, Given]) -> str:
    """Return a warning about `flags` that a plain script does not read; else "".

    A script is plain if neither it nor a file next to it names tandem.
    """
    unread = [SETTINGS[key] for key in flags if key in SETTINGS and _is_for_training(key)]
    if program.kind != "script" or not unread or _names_tandem(Path(program.target)):
        return ""
    typed = shlex.join([word for each in unread for word in (each.flag, flags[each.name].text)])
    return (
        f"{program} does not use tandem, so these have no effect: {typed}; "
        f"a script's own arguments follow it: tandem launch {program} {typed}"
    )


def _is_for_training(key: str) -> bool:
    return key in TRAINING_SETTINGS or SETTINGS[key].slice in TRAINING_SLICES


def _names_tandem(script: Path) -> bool:
    try:
        return any(b"tandem" in each.read_bytes() for each in islice(script.parent.glob("*.py"), MOST_FILES))
    except OSError:
        return True


def hint(program: Program, last_line: str) -> str:
    """Return what to type instead if `last_line`, a script's last line, rejects flags of tandem; else ""."""
    if program.kind == "command" or REJECTS.search(last_line) is None:
        return ""
    rejected = {word.partition("=")[0] for word in re.findall(r"--[\w.=-]+", last_line)}
    words = [word for word in _of_tandem(program) if word[0].partition("=")[0] in rejected]
    if not words:
        return ""
    names = [word[0].partition("=")[0] for word in words]
    verb, it = ("follows", "it") if len(names) == 1 else ("follow", "them")
    typed = shlex.join([part for word in words for part in word])
    return (
        f"{', '.join(names)} {verb} the script, so the script gets {it}; "
        f"to give {it} to tandem: tandem launch {typed} {program}"
    )


def _of_tandem(program: Program) -> Iterator[list[str]]:
    """Yield the flags of tandem among the program's arguments, each with its value."""
    words = program.arguments
    for index, word in enumerate(words):
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS or name in TORCHRUN:
            yield [word, *words[index + 1 : index + 1 + takes_next(word, words[index + 1 : index + 2])]]
        elif name in TORCHRUN_SWITCHES:
            yield [word]
