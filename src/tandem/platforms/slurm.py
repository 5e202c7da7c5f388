"""Read the position of a Slurm task, and parse Slurm's lists of nodes and tasks.

tests/fixtures/environments has variables captured from a real Slurm; docs/slurm.md is for users.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tandem.errors import ConfigError
from tandem.platforms import by_hand
from tandem.platforms.environment import (
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    assignments,
    parse_integer,
)
from tandem.platforms.laptop import alone
from tandem.process import stat_of

ORDER = 30  # only torchrun and mpirun run inside its steps
MARKS = ("SLURM_JOB_ID",)
STEP_PREFIXES = ("SLURM_STEP_", "SLURM_STEPID")
VARIABLE_NAMES = VariableNames(("SLURM_STEP_NUM_NODES",), ("SLURM_NODEID",))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of `srun`.

    A batch script and an interactive shell have no step ID, or a reserved one. A job submitted from a step of
    another job inherits that step's variables: a single task that runs elsewhere is ignored; several tasks
    may be real and are rejected as a contradiction, so that each does not become a job of one.
    """
    step = environ.get("SLURM_STEP_ID", "")
    # Slurm numbers its batch, extern and interactive steps from the top of the range.
    if not step.isdigit() or int(step) >= 0xFFFFFF00:
        return False
    counts = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    return not _is_outside_job(environ) or any(environ.get(name, "1") != "1" for name in counts)


def _is_outside_job(environ: Mapping[str, str]) -> bool:
    of_step = environ.get("SLURM_STEP_NODELIST", "")
    of_job = environ.get("SLURM_JOB_NODELIST", "")
    return bool(of_step and of_job) and not set(expand_nodelist(of_step)) <= set(expand_nodelist(of_job))


def without_inherited_step(environ: Mapping[str, str], pid: int) -> Mapping[str, str]:
    """Return the environment without the variables of a step that process `pid` does not belong to.

    If both jobs are on one node, only the daemon that started the process distinguishes them. In a container,
    where the daemon is not visible, the variables count as they are.
    """
    if not in_step(environ):
        return environ
    around = _step_around(pid)
    # None: no daemon is visible from here, for example in a container.
    if around in (None, (environ.get("SLURM_JOB_ID"), environ["SLURM_STEP_ID"])):
        return environ
    return {name: value for name, value in environ.items() if not name.startswith(STEP_PREFIXES)}


def _step_around(pid: int) -> tuple[str, str] | None:
    """Return the (job, step) of the nearest daemon above a process, called `slurmstepd: [JOB.STEP]`."""
    while pid > 1:
        # The process may end meanwhile, and a mount with hidepid hides those of other users, such as
        # slurmd's.
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            # JOB+OFFSET is one part of a heterogeneous job.
            if match := re.match(r"slurmstepd: \[([0-9]+)(?:\+[0-9]+)?\.([^.\] ]+)\]", words):
                return match[1], match[2]
        fields = stat_of(pid)
        pid = int(fields[1]) if fields else 0
    return None


def without_job(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment for a run outside the job, without the placement by its script's variables."""
    return {name: value for name, value in by_hand.unplaced(environ).items() if name not in MARKS}


def read(env: PlatformEnv) -> Placement:
    """Read the position: a node's only task is its agent or its rank; each of several tasks is a rank."""
    parts = env.environ.get("SLURM_HET_SIZE") or "1"
    if parse_integer("SLURM_HET_SIZE", parts) > 1:
        raise ConfigError(
            f"SLURM_HET_SIZE={parts}: this job is heterogeneous, but all nodes must be alike; submit it as "
            "one part, such as sbatch --nodes=2 --gpus-per-node=1"
        )
    is_task = in_step(env.environ)
    # The user places the nodes, and Slurm has not.
    if "node_rank" in env.flags and not is_task:
        return by_hand.read(env)
    env = env.for_platform("slurm", MARKS, VARIABLE_NAMES)
    placement = _placed(env) if is_task else _without_step(env)
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    step = env.environ["SLURM_STEP_ID"] if is_task else "batch"
    return replace(
        placement,
        job=f"slurm-{env.variable('SLURM_JOB_ID')}.{step}",
        array=(env.environ[names[0]], env.environ[names[1]]) if any_set(env.environ, names[:1]) else None,
        restarts=parse_integer("SLURM_RESTART_COUNT", env.environ.get("SLURM_RESTART_COUNT") or "0"),
    )


def _placed(env: PlatformEnv) -> Placement:
    nodes = env.number("nodes")
    node_rank = env.number("node_rank")
    names = expand_nodelist(
        env.environ.get("SLURM_STEP_NODELIST") or env.environ.get("SLURM_JOB_NODELIST", "")
    )
    here = env.environ.get("SLURMD_NODENAME") or env.hostname
    if (
        len(names) != nodes
        or node_rank >= nodes
        or (env.environ.get("SLURMD_NODENAME") and names[node_rank] != here)
        or _is_outside_job(env.environ)
    ):
        raise ConfigError(
            f"SLURM_JOB_NODELIST={env.environ.get('SLURM_JOB_NODELIST', '')}, "
            f"SLURM_STEP_NODELIST={','.join(names)}, SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={node_rank} "
            f"and SLURMD_NODENAME={here} contradict each other; start with srun, and do not set them by hand"
        )
    # Rank 0's agent hosts the store, and Slurm gives node 0 of the step the first name.
    host = env.text("host") or names[0]
    if host.split(".")[0] in names[1:]:
        raise ConfigError(
            f"{assignments(env.sources('host'))} is not the step's first node {names[0]}, where rank 0 is; "
            "omit it"
        )
    # Two jobs, or two steps of one job, may share a node, so their stores should use different ports. If the
    # ports are equal anyway (numbers repeat), `job` tells the stores apart.
    job = env.variable("SLURM_JOB_ID")
    step = env.variable("SLURM_STEP_ID")
    placement = Placement(
        "slurm",
        nodes,
        node_rank,
        env.nproc(),
        host,
        env.number("port", 20000 + (job + 131 * step) % 10000),
        local_name=here,
    )
    tasks = expand_tasks(env.environ.get("SLURM_STEP_TASKS_PER_NODE", "1" if nodes == 1 else f"1(x{nodes})"))
    if len(tasks) != nodes:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes but SLURM_STEP_NUM_NODES={nodes}; "
            "start with srun"
        )
    return replace(placement, one_process_per_node=True) if max(tasks) == 1 else _ranks(env, placement, tasks)


def _ranks(env: PlatformEnv, placement: Placement, tasks: list[int]) -> Placement:
    rank = env.variable("SLURM_PROCID")
    local_rank = env.variable("SLURM_LOCALID")
    here = tasks[placement.node_rank]
    if rank >= sum(tasks) or local_rank >= here or placement.nproc not in (None, here):
        raise ConfigError(
            f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} and --nproc={placement.nproc or 'auto'} "
            f"contradict {here} tasks here of {sum(tasks)}; "
            "start one task per node (--ntasks-per-node=1), or omit --nproc"
        )
    return replace(
        placement,
        nproc=here,
        rank=rank,
        local_rank=local_rank,
        world_size=sum(tasks),
        device=_own_device(env.environ),
    )


def _own_device(environ: Mapping[str, str]) -> int | None:
    """Return 0 if each task sees only its own GPUs (--gpus-per-task, --gpu-bind), or None if all see all."""
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    here = environ.get("SLURM_GPUS_ON_NODE") or "0"
    # If fewer GPUs are visible than the node has, Slurm has bound them to this task.
    return 0 if visible and here.isdigit() and len(visible) < int(here) else None


def _without_step(env: PlatformEnv) -> Placement:
    """Place a batch script or a shell in an allocation: only on one node, because other nodes would be idle.

    Several tasks on one node are allowed if the number of ranks is given.
    """
    # SLURM_NTASKS is the batch script's request. With --nodes or --nproc, the command line decides.
    names = ["SLURM_JOB_NUM_NODES"]
    if not {"nodes", "nproc"} & set(env.flags):
        names.append("SLURM_NTASKS")
    counts = {name: env.environ.get(name) or "1" for name in names}
    if any(parse_integer(name, value, 1) > 1 for name, value in counts.items()):
        raise ConfigError(
            f"{assignments(counts)} but this is not a step (no SLURM_STEP_ID); start it with srun: "
            "srun --ntasks-per-node=1 tandem launch ..."
        )
    return alone(env)


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's host list in order: `node[1-2,7],gpu-a[01-02]` -> node1 node2 node7 gpu-a01 gpu-a02.

    Several brackets in one name multiply; the last one varies fastest. Raises ConfigError if malformed.
    """
    names = [
        name
        for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+|[,\[]", text)
        if item != ","
        for name in _expand_name(item, text)
    ]
    if not names:
        raise ConfigError(f"Slurm's node list {text!r} is empty; start with srun")
    return names


def _expand_name(item: str, nodelist: str) -> list[str]:
    names = [""]
    for part in re.findall(r"\[[^\]]*\]|[^\[\]]+|[\[\]]", item):
        if part.startswith("["):
            names = [name + number for name in names for number in _expand_bracket(part, nodelist)]
        elif part == "]" or not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ConfigError(
                f"{nodelist!r} is not a Slurm node list; an example is node[1-3,7],gpu-a[01-02]"
            )
        else:
            names = [name + part for name in names]
    return names


def _expand_bracket(bracket: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for entry in bracket[1:-1].split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", entry)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        # The limit keeps a typo from filling the memory.
        if int(last) < int(first) or int(last) - int(first) > 100_000:
            raise ConfigError(
                f"{nodelist!r} is not a Slurm node list; an example is node[1-3,7],gpu-a[01-02]"
            )
        # Slurm keeps the zeros of the first number: gpu[08-10] is gpu08, gpu09 and gpu10.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Expand Slurm's tasks per node in node order: `2(x3),1` -> 2 2 2 1. Raises ConfigError if malformed."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?", entry)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE: invalid value {text!r}; expected a list such as 2(x3),1"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
