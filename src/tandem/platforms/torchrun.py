"""Read the position of a rank started by torchrun, which sets everything."""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import Placement, PlatformEnv, VariableNames, any_set, assignments

ORDER = 10  # first: torchrun runs inside Slurm steps, pods and every cloud's jobs
MARKS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")
VARIABLE_NAMES = VariableNames(("GROUP_WORLD_SIZE",), ("GROUP_RANK",), ("LOCAL_WORLD_SIZE",))


def detect(environ: Mapping[str, str]) -> bool:
    # LOCAL_RANK alone may be set by hand (by_hand.py); torchrun always sets both.
    return any_set(environ, ("TORCHELASTIC_RUN_ID",)) or bool(
        environ.get("LOCAL_RANK") and environ.get("LOCAL_WORLD_SIZE")
    )


def read(env: PlatformEnv) -> Placement:
    env = env.for_platform("torchrun", MARKS, VARIABLE_NAMES)
    rank, local_rank, world = (env.variable(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    nproc = env.variable("LOCAL_WORLD_SIZE")
    stated = env.flags.get("nproc", "auto")
    if stated not in ("auto", str(nproc)):
        raise ConfigError(
            f"--nproc={stated}, LOCAL_WORLD_SIZE={nproc} contradict each other: this process is already rank "
            f"{rank} of {world}, which torchrun or tandem launch started; omit --nproc, or run this command "
            "outside of a rank"
        )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if nproc < 1 or rank >= world or local_rank >= nproc or nproc > world:
        raise ConfigError(
            f"{assignments({name: env.environ[name] for name in names})} contradict each other; "
            "start with torchrun, and do not set them by hand"
        )
    return Placement(
        "torchrun",
        env.number("nodes", world // nproc),
        env.number("node_rank", rank // nproc),
        nproc,
        env.host(),
        env.number("port"),
        local_name=env.hostname,
        rank=rank,
        local_rank=local_rank,
        world_size=world,
    )
