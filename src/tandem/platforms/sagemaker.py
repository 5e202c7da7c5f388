"""Read the position on Amazon SageMaker: one container per instance, each with the host names of all.

The variables are those of SageMaker's training toolkit (ENVIRONMENT_VARIABLES.md of
aws/sagemaker-training-toolkit) and of the SageMaker SDK's own container setup: SM_HOSTS, "sorted
lexicographically", SM_CURRENT_HOST, SM_NUM_GPUS and SM_RESOURCE_CONFIG. Every training container has
TRAINING_JOB_ARN, even without the toolkit.
"""

import json
from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms import by_hand
from tandem.platforms.environment import (
    DEFAULT_PORT,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    assignments,
    parse_integer,
)

ORDER = 40  # before by-hand, because the toolkit sets MASTER_ADDR
MARKS = ("SM_HOSTS", "SM_CURRENT_HOST", "SM_RESOURCE_CONFIG", "TRAINING_JOB_ARN")
VARIABLE_NAMES = VariableNames(
    nodes=("SM_HOST_COUNT",),
    node_rank=("SM_CURRENT_HOST_RANK",),
    host=("MASTER_ADDR", "SM_MASTER_ADDR"),
    port=("MASTER_PORT", "SM_MASTER_PORT"),
)


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    """Read the position; the host whose name sorts first is node 0."""
    # Without the toolkit, the container only shows that this is SageMaker; the flags provide the rest.
    if env.flags.keys() >= {"node_rank", "host"} and not any_set(env.environ, MARKS[:3]):
        return by_hand.read(env)
    env = env.for_platform("sagemaker", MARKS, VARIABLE_NAMES)
    hosts, here = _hosts(env)
    host = env.text("host") or hosts[0]
    nodes = env.number("nodes", len(hosts))
    node_rank = env.number("node_rank", hosts.index(here))
    if (nodes, node_rank, host.split(".")[0]) != (len(hosts), hosts.index(here), hosts[0]):
        given = {**env.sources("nodes"), **env.sources("node_rank"), **env.sources("host")}
        raise ConfigError(
            f"{assignments(given)} contradicts SM_HOSTS={','.join(hosts)} with SM_CURRENT_HOST={here}; "
            "omit it"
        )
    gpus = parse_integer("SM_NUM_GPUS", env.environ.get("SM_NUM_GPUS") or "0")
    return Placement(
        "sagemaker",
        nodes,
        node_rank,
        # SM_NUM_GPUS is 0 on CPU instances, where the number of ranks is auto.
        env.nproc() or gpus or None,
        host,
        env.number("port", DEFAULT_PORT),
        local_name=here,
    )


def _hosts(env: PlatformEnv) -> tuple[list[str], str]:
    """Return (all hosts sorted by name, this host), from SM_HOSTS or else SM_RESOURCE_CONFIG."""
    resources = _json(env, "SM_RESOURCE_CONFIG", "{}")
    resources = resources if isinstance(resources, dict) else {}
    hosts = _json(env, "SM_HOSTS", json.dumps(resources.get("hosts") or []))
    here = env.environ.get("SM_CURRENT_HOST") or resources.get("current_host")
    # Sort here, so that all hosts number the nodes alike, whichever variable the list is from.
    names = sorted({str(name) for name in hosts}) if isinstance(hosts, list) else []
    if not names or not here:
        lacking = "SM_CURRENT_HOST" if names else "SM_HOSTS"
        raise ConfigError(
            f"{_set_here(env)} but {lacking} is not; start with SageMaker's training toolkit, "
            "which sets it, or give --nodes, --node-rank and --master"
        )
    if here not in names:
        raise ConfigError(
            f"SM_CURRENT_HOST={here} is not one of SM_HOSTS={','.join(names)}; do not set these by hand"
        )
    return names, str(here)


def _set_here(env: PlatformEnv) -> str:
    names = [name for name in MARKS if env.environ.get(name)]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set"


def _json(env: PlatformEnv, name: str, default: str) -> object:
    try:
        return json.loads(env.environ.get(name) or default)
    except ValueError:
        raise ConfigError(f"{name}={env.environ[name]!r} is not JSON; do not set it by hand") from None
