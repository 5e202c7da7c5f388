"""Read the position of a replica of the Docker Compose service `node`; replica.py finds its index."""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import DEFAULT_PORT, Placement, PlatformEnv, VariableNames, any_set

ORDER = 80  # its variables are tandem's own, so it only needs to precede by-hand
MARKS = ("TANDEM_COMPOSE_NODES", "TANDEM_COMPOSE_INDEX", "TANDEM_COMPOSE_PROJECT")
VARIABLE_NAMES = VariableNames(("TANDEM_COMPOSE_NODES",), host=(), port=())


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    """Read the position; replicas are named <project>-node-<index>, counted from 1."""
    env = env.for_platform("compose", MARKS, VARIABLE_NAMES)
    project = env.environ.get("TANDEM_COMPOSE_PROJECT")
    index = env.variable("TANDEM_COMPOSE_INDEX")
    if not project:
        raise ConfigError(
            "TANDEM_COMPOSE_INDEX is set but TANDEM_COMPOSE_PROJECT is not; start with docker compose up"
        )
    nodes = env.number("nodes")
    if not 1 <= index <= nodes:
        raise ConfigError(
            f"TANDEM_COMPOSE_INDEX={index} is not 1 to TANDEM_COMPOSE_NODES={nodes}; "
            "set NODES instead of --scale; if the indices have a gap: docker compose down, then up again"
        )
    return Placement(
        "compose",
        nodes,
        env.number("node_rank", index - 1),
        env.nproc(),
        env.text("host") or f"{project}-node-1",
        env.number("port", DEFAULT_PORT),
        local_name=f"{project}-node-{index}",
    )
