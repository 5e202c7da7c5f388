"""Define a user's program, and the settings that its ranks need. Standard library only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from tandem.distributed.position import Grant, RankStart

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
        """Return the words that select this program on another `tandem launch` command line."""
        marks = {"script": [], "module": ["-m"], "command": ["--"]}[self.kind]
        return [*marks, self.target, *self.arguments]

    def __str__(self) -> str:
        return self.target if self.kind != "module" else f"-m {self.target}"


@dataclass(frozen=True)
class Job:
    """The program, and the settings of all its ranks on this node.

    `logs`: the directory of the ranks' logs. `variables`: the settings that were given, as TANDEM_ variables.
    `hang_timeout`: seconds, or None to derive it from the step time. `patience`: seconds that a start, an
    evaluation or a save may take. `fresh_interpreter`: each rank is a new interpreter.
    """

    program: Program
    logs: str
    variables: Mapping[str, str]
    max_restarts: int
    hang_timeout: float | None
    patience: float
    json_lines: bool
    fresh_interpreter: bool


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


# Set a rank's environment: the variables that torchrun's workers get, and tandem's settings.

RUN_ID = "tandem"


def error_file(grant: Grant, rank: int) -> Path:
    """Return the path where torch's `@record`, and tandem's runner, record the error that ended the rank."""
    return grant.folder / f"attempt-{grant.restart}" / f"rank-{rank}" / "error.json"


def variables(job: Job, start: RankStart, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the rank that `start` describes, on top of the node's environment `given`.

    Names and rules are those of torch 2.15's agent; tests/scripts/test_environment.py compares them with a
    real torchrun. MASTER_ADDR and MASTER_PORT are a store that the agent hosts for this generation alone.
    """
    position = start.position
    grant = start.grant
    host, port = start.connection.master or ("127.0.0.1", 0)
    found = {
        "RANK": position.rank,
        "LOCAL_RANK": position.local_rank,
        "GROUP_RANK": position.node_rank,
        "ROLE_RANK": position.rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": position.world_size,
        "LOCAL_WORLD_SIZE": position.local_world_size,
        "GROUP_WORLD_SIZE": position.nodes,
        "ROLE_WORLD_SIZE": position.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": grant.restart,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file(grant, position.rank),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    # torchrun does the same: it counts ranks on its node.
    if position.ranks_on_host > 1 and "OMP_NUM_THREADS" not in given:
        found["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in found.items()} | dict(job.variables)


def set_variables(job: Job, start: RankStart) -> None:
    """Set the rank's variables in this process."""
    os.environ.update(variables(job, start, os.environ))
