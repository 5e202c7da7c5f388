"""The work of the nodes, a task or a script on this host, as variables of compose.yaml."""

import argparse
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from tandem.cluster.engine import ClusterError
from tandem.script.job import problem_of_script

AT = "/script"
"""Where a script's directory is mounted."""
RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def work_of(options: argparse.Namespace, given: Mapping[str, str]) -> dict[str, str]:
    """Return COMMAND, RUN and the source of the code; `given` has the TANDEM_ variables.

    Raises ClusterError.
    """
    if options.script:
        found = _script(options)
    elif options.script_args:
        raise ClusterError("SCRIPT_ARGS are a script's, and there is none; give SCRIPT=train.py, or ARGS")
    else:
        found = _task(options, given)
    run = options.run or found["RUN"]
    check_run(run)
    return {**found, "RUN": run}


def check_run(name: str) -> None:
    """Raise ClusterError unless `text` can be the name of a run's directory in the volume."""
    if not RUN.fullmatch(name):
        raise ClusterError(f"RUN: invalid value {name!r}; expected letters, digits, dots and dashes")


def _task(options: argparse.Namespace, given: Mapping[str, str]) -> dict[str, str]:
    task = options.task or given.get("TANDEM_TASK", "digits")
    found = {"TANDEM_TASK": task, "COMMAND": shlex.join(["launch", *_words("ARGS", options.args)])}
    path, colon, name = task.partition(":")
    # Any other name is a built-in task or a module of the image.
    if colon and path.endswith(".py"):
        if not Path(path).is_file():
            raise ClusterError(
                f"TASK: invalid value {task!r}; file {path} does not exist; expected FILE.py:Class or digits"
            )
        file = _readable(f"TASK={task}", Path(path).resolve())
        found |= {"TASKS": str(file.parent), "TANDEM_TASK": f"/tasks/{file.name}:{name}"}
    found["RUN"] = re.sub(r"[^A-Za-z0-9_.-]+", "-", task.rpartition(":")[2] or task)
    return found


def _script(options: argparse.Namespace) -> dict[str, str]:
    """Return a script's variables. Its working directory is the run's, so relative output paths are kept."""
    path = Path(options.script)
    named = f"SCRIPT={options.script}"
    if options.task:
        raise ClusterError(f"{named} and TASK={options.task}: choose one: a script has no task")
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "is not there"
        raise ClusterError(f"{named} {what}; give the path of a Python script: SCRIPT=train.py")
    # Resolved, because a link's target would be outside the mounted directory.
    file = _readable(named, path.resolve())
    problem = problem_of_script(path)
    if problem:
        raise ClusterError(f"SCRIPT: {problem}")
    ours = _words("ARGS", options.args)
    own = _words("SCRIPT_ARGS", options.script_args)
    # The name must pass `check_run`, and a script's name may contain spaces.
    run = re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem)
    return {
        "COMMAND": shlex.join(["launch", *ours, f"{AT}/{file.name}", *own]),
        "TASKS": str(file.parent),
        "TASKS_AT": AT,
        "RUN": run,
        "WORKING_DIR": f"/checkpoints/{options.run or run}",
    }


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ClusterError(f"{name}={text}: {str(error).lower()}; words are split as a shell does") from None


def _readable(given: str, file: Path) -> Path:
    """Check that the containers' user, neither owner nor group member, can read the file."""
    for path, needed in ((file.parent, stat.S_IROTH | stat.S_IXOTH), (file, stat.S_IROTH)):
        if path.stat().st_mode & needed != needed:
            what = "o+rx" if path.is_dir() else "o+r"
            raise ClusterError(
                f"{given}: user 10001 of the containers may not read {path}; allow it: chmod {what} {path}"
            )
    return file
