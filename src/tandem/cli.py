"""The verbs. Reads the environment once and passes it on; imports what a verb needs when it is called.

`tandem --help` and `tandem health` therefore need no torch and take milliseconds.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem import __version__
from tandem.errors import FINISHED, MISCONFIGURED, ConfigError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.placement import Placement
    from tandem.config import Settings

log = logging.getLogger("tandem.cli")

Arguments = Sequence[str]
Environment = Mapping[str, str]

# Named, not imported: the agent's fork server has to start before anything imports torch.
RANK_FUNCTION = "tandem.training.run:run_rank"

HELP = """tandem: multi-node PyTorch training that survives, and tells you what it is doing.

  tandem launch [--nodes N] [settings]   train: finds the platform, starts this node's ranks, restarts them
  tandem train [settings]                train as the rank that the environment says (torchrun, or alone)
  tandem checkpoints ls|verify|prune DIR look after the checkpoints of a run
  tandem config [--explain] [settings]   every setting, its value and where it comes from
  tandem doctor [settings]               versions, memory, GPUs, the place in the cluster
  tandem health                          is the run making progress? (for probes)
  tandem --version

Settings are flags (--epochs 3), variables (TANDEM_EPOCHS=3), lines of .env or keys of a --config FILE.toml,
in this order of precedence; `tandem config --explain` lists them all. Start here: tandem launch --nodes 2
"""


def main() -> None:
    """Entry of the console script; leaves with the exit code of the verb."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    try:
        code = run(verb, sys.argv[2:], os.environ)
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        os._exit(code)  # threads of gloo and of the store abort some interpreters at a normal exit
    sys.exit(code)


def run(verb: str, arguments: Arguments, environ: Environment) -> int:
    """Call the verb; raises TandemError with one line for the user."""
    if verb in ("-h", "--help", "help") or "--help" in arguments or "-h" in arguments:
        print(HELP, end="")
        return FINISHED
    if verb in ("--version", "version"):
        print(f"tandem {__version__}")
        return FINISHED
    if verb not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean `tandem {near[0]}`?" if near else "see `tandem --help`"
        raise ConfigError(f"unknown verb {verb!r}; valid are {', '.join(VERBS)}; {hint}")
    return VERBS[verb](arguments, environ)


def _settings_and_placement(arguments: Arguments, environ: Environment) -> "tuple[Settings, Placement]":
    from tandem.cluster.placement import detect
    from tandem.cluster.replica import with_index
    from tandem.config import load
    from tandem.launch import resolve_run_dir
    from tandem.log import setup

    settings = load(arguments, environ).settings
    placement = detect(
        with_index(environ),
        socket.gethostname(),
        nodes=settings.nodes,
        node_rank=settings.node_rank,
        master=settings.master,
        nproc=settings.nproc,
        elastic=settings.elastic,
    )
    setup(None, None, placement.node_rank, True, settings.log_format == "json")
    return resolve_run_dir(settings, placement, time.time()), placement


def launch(arguments: Arguments, environ: Environment) -> int:
    """Node level: this node's agent, or all nodes of a laptop."""
    return (_launch_replica if environ.get("TANDEM_COMPOSE_PROJECT") else _launch)(arguments, environ)


def _launch(arguments: Arguments, environ: Environment) -> int:
    from tandem.signals import StopFlag

    stop = StopFlag().install()
    settings, placement = _settings_and_placement(arguments, environ)
    if placement.rank is not None:
        return _train(settings, placement)
    from tandem.launch import run_this_node, simulate, with_port

    if placement.platform == "none":
        print(where(settings), file=sys.stderr)
        if placement.nodes > 1:
            return simulate(settings, placement, arguments, environ, stop)
        placement = with_port(placement)
    state = environ.get("TANDEM_STATE_DIR")
    return run_this_node(settings, placement, RANK_FUNCTION, Path(state) if state else None, stop)


def _launch_replica(arguments: Arguments, environ: Environment) -> int:
    """`launch` in a container of Compose, which would start it again also where that cannot help."""
    from tandem.cluster.replica import note_end, stay_down_code

    run_dir, container = Path(environ.get("TANDEM_RUN_DIR", ".")), socket.gethostname()
    code = stay_down_code(run_dir, container)
    if code is not None:
        return code
    try:
        code = _launch(arguments, environ)
    except TandemError as error:
        note_end(run_dir, container, error.exit_code)
        raise
    note_end(run_dir, container, code)
    return code


def where(settings: "Settings") -> str:
    """Where a person finds what the run makes."""
    run_dir = Path(str(settings.run_dir))
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    return "\n".join(
        [
            f"run          {shown}",
            f"checkpoints  {shown}/checkpoints",
            f"logs         {shown}/log",
            f"metrics      http://{settings.metrics_host}:{settings.metrics_port}/metrics",
        ]
    )


def train(arguments: Arguments, environ: Environment) -> int:
    """Rank level: what the environment says, or alone."""
    settings, placement = _settings_and_placement(arguments, environ)
    if placement.rank is None and placement.nodes > 1:
        raise ConfigError(
            f"`tandem train` is one rank, and no environment says which of {placement.nodes} nodes' it is; "
            f"start them with `tandem launch --nodes {placement.nodes}` or torchrun"
        )
    return _train(settings, placement)


def _train(settings: "Settings", placement: "Placement") -> int:
    from tandem.cluster.ranks import resolve
    from tandem.launch import run_lone_rank

    return run_lone_rank(settings, placement, resolve(RANK_FUNCTION))


def checkpoints(arguments: Arguments, environ: Environment) -> int:
    """`ls`, `verify` and `prune` of a run's checkpoints, without torch."""
    from tandem.checkpoint.store import CheckpointStore, list_checkpoints

    action, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    keep = 3
    if "--keep" in rest:
        at = rest.index("--keep")
        try:
            keep = int(rest[at + 1])
        except (IndexError, ValueError):
            keep = 0
        if keep < 1:
            raise ConfigError("--keep needs a number of at least 1: tandem checkpoints prune DIR --keep 3")
        del rest[at : at + 2]
    if action not in ("ls", "verify", "prune") or len(rest) != 1:
        raise ConfigError("say what to do and where: tandem checkpoints ls|verify|prune RUN_DIR [--keep N]")
    directory = Path(rest[0])
    directory = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the run directory")
    if action == "prune":
        removed = CheckpointStore(directory).prune(keep)
        print(f"removed {len(removed)} checkpoints, kept the newest {keep}")
        return FINISHED
    rows = list_checkpoints(directory, verify=action == "verify")
    for row in rows:
        verified = {None: "", True: "verified", False: f"DAMAGED: {row.problem}"}[row.verified]
        print(f"{row.step:>10}  {row.bytes:>14,} bytes  {row.age_seconds:>8.0f} s old  {verified}".rstrip())
    if not rows:
        print(f"no checkpoints in {directory}")
    return 1 if any(row.verified is False for row in rows) else FINISHED


def config(arguments: Arguments, environ: Environment) -> int:
    """Every value, and with --explain where it came from."""
    from tandem.config import explain, load, markdown_table

    rest = [argument for argument in arguments if argument not in ("--explain", "--markdown")]
    if "--markdown" in arguments:
        print(markdown_table(), end="")
        return FINISHED
    loaded = load(rest, environ)
    if "--explain" in arguments:
        print(explain(loaded))
    else:
        for name, value in loaded.settings.to_dict().items():
            print(f"{name} = {value!r}")
    return FINISHED


def doctor(arguments: Arguments, environ: Environment) -> int:
    """Versions and what this place offers; always 0 once the settings are valid."""
    from tandem.config import load
    from tandem.doctor import report

    print(report(load(arguments, environ).settings, environ))
    return FINISHED


def health(arguments: Arguments, environ: Environment) -> int:
    """Standard library only: the verdict on the heartbeat file."""
    from tandem.observe.health import main as health_main

    if arguments:
        print("tandem: health takes no arguments", file=sys.stderr)
        return MISCONFIGURED
    return health_main(environ)


VERBS: dict[str, Callable[[Arguments, Environment], int]] = {
    "launch": launch,
    "train": train,
    "checkpoints": checkpoints,
    "config": config,
    "doctor": doctor,
    "health": health,
}
