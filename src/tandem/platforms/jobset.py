"""Read the position of a JobSet's pod.

The manifest sets JOBSET_NAME, REPLICATED_JOB_NAME and NODES; the pods' names follow from them.
"""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    pod_name,
)

ORDER = 60  # before the Indexed Job, whose pods it uses
MARKS = ("JOBSET_NAME",)
VARIABLE_NAMES = VariableNames(("NODES", "NNODES"), ("NODE_RANK", "JOB_COMPLETION_INDEX"))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    env = env.for_platform("jobset", MARKS, VARIABLE_NAMES)
    names = [env.environ.get(name) for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME")]
    host = env.text("host")
    if host is None and not all(names):
        raise ConfigError(
            "JOBSET_NAME is set but neither REPLICATED_JOB_NAME nor MASTER_ADDR is; "
            "set one in the container's env"
        )
    # JobSet names a pod JOBSET-REPLICATEDJOB-JOB-POD, in a headless service with the JobSet's name.
    host = host or f"{names[0]}-{names[1]}-0-0.{names[0]}"
    return Placement(
        "jobset",
        env.number("nodes"),
        env.number("node_rank"),
        env.nproc(),
        host,
        env.number("port", DEFAULT_PORT),
        local_name=pod_name(env.hostname, host),
    )
