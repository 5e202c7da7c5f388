"""Read the position of a pod of a Kubernetes Indexed Job.

Kubernetes sets only the pod's index. The number of nodes and the master come from the manifest or from flags.
"""

from collections.abc import Mapping

from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    pod_name,
)

ORDER = 70  # after the kinds of job that are built from Indexed Jobs
MARKS = ("JOB_COMPLETION_INDEX",)
VARIABLE_NAMES = VariableNames(("NNODES",), ("NODE_RANK", "JOB_COMPLETION_INDEX"))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    env = env.for_platform("indexed-job", MARKS, VARIABLE_NAMES)
    host = env.text("host")
    nodes = env.number("nodes")
    # Kubernetes does not give a pod any other pod's address, so any default would be wrong.
    if host is None and nodes > 1:
        raise env.missing("host")
    host = host or LOOPBACK
    return Placement(
        "indexed-job",
        nodes,
        env.number("node_rank"),
        env.nproc(),
        host,
        env.number("port", DEFAULT_PORT),
        local_name=pod_name(env.hostname, host),
    )
