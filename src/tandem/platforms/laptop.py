"""Place one node, or `--nodes N` on this host, where no platform is detected.

`--node-rank` and `--master` place it by hand.
"""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms import by_hand
from tandem.platforms.environment import LOOPBACK, Placement, PlatformEnv, VariableNames, loopback_name

ORDER = 100  # last: it detects anything
VARIABLE_NAMES = VariableNames(host=(), port=())
SIMULATED_NODES_LIMIT = 154  # 127.0.0.101 to 127.0.0.254


def detect(environ: Mapping[str, str]) -> bool:
    return True


def read(env: PlatformEnv) -> Placement:
    if "node_rank" in env.flags or "host" in env.flags:
        return by_hand.read(env)
    return alone(env.for_platform("none", (), VARIABLE_NAMES))


def alone(env: PlatformEnv) -> Placement:
    """Place all nodes on this host; each simulated node gets its own loopback address."""
    nodes = int(env.flags.get("nodes", env.elastic[1] if env.elastic else 1))
    if nodes > SIMULATED_NODES_LIMIT:
        raise ConfigError(
            f"--nodes: {nodes} is too many for one host; expected 1 to {SIMULATED_NODES_LIMIT}, "
            "or use --node-rank and --master"
        )
    shared = nodes > 1
    name = loopback_name(0) if shared else LOOPBACK
    return Placement(
        env.platform,
        nodes,
        0,
        env.nproc(),
        name,
        0,
        local_name=name,
        nodes_share_host=shared,
        starts_all=True,
    )
