"""What `tandem launch` and `tandem train` do, from what was given to the code that the process ends with."""

import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tandem.checkpoint.storage import address
from tandem.checkpoint.storage.copies import local_folder
from tandem.config import Given, Settings, as_flags, resolve
from tandem.errors import ConfigError, TandemError
from tandem.launch.node import run_this_node, with_port
from tandem.launch.run_dir import resolve_run_dir
from tandem.launch.simulated import simulate
from tandem.launch.workers import resolve as import_rank_function
from tandem.log import setup
from tandem.platforms.placement import Placement, detect
from tandem.platforms.replica import note_end, stay_down_code, with_index
from tandem.signals import StopFlag

Flags = Mapping[str, Given]
Environment = Mapping[str, str]

# Named, not imported: the agent's fork server has to start before anything imports torch.
RANK_FUNCTION = "tandem.training.run:run_rank"


def launch(flags: Flags, environ: Environment) -> int:
    """Node level: this node's agent, or all nodes of a laptop. Raises TandemError."""
    if not environ.get("TANDEM_COMPOSE_PROJECT"):
        return _launch(flags, environ)
    # Compose would start this container again also where that cannot help.
    run_dir, container = local_folder(environ.get("TANDEM_RUN_DIR", ".")), socket.gethostname()
    code = stay_down_code(run_dir, container)
    if code is not None:
        return code
    try:
        code = _launch(flags, environ)
    except TandemError as error:
        note_end(run_dir, container, error.exit_code)
        raise
    note_end(run_dir, container, code)
    return code


def _launch(flags: Flags, environ: Environment) -> int:
    stop = StopFlag().install()
    settings, placement = _begin(flags, environ)
    if placement.rank is not None:
        return _train(settings, placement)
    if placement.platform == "none":
        if settings.telemetry.log_format != "json":
            print(where(Path(str(settings.run.run_dir))), file=sys.stderr)
        placement = with_port(placement)
        if placement.nodes > 1:
            return simulate(settings, placement, as_flags(flags), environ, stop)
    state = environ.get("TANDEM_STATE_DIR")
    return run_this_node(settings, placement, RANK_FUNCTION, Path(state) if state else None, stop)


def train(flags: Flags, environ: Environment) -> int:
    """Rank level: what the environment says, or alone. Raises TandemError."""
    settings, placement = _begin(flags, environ)
    if placement.rank is None and placement.nodes > 1:
        raise ConfigError(
            f"`tandem train` is one rank, and no environment says which of {placement.nodes} nodes' it is; "
            f"start them with `tandem launch --nodes {placement.nodes}` or torchrun"
        )
    return _train(settings, placement)


def _train(settings: Settings, placement: Placement) -> int:
    from tandem.launch.lone_rank import run_lone_rank

    return run_lone_rank(settings, placement, import_rank_function(RANK_FUNCTION))


def _begin(flags: Flags, environ: Environment) -> tuple[Settings, Placement]:
    settings = resolve(flags, environ).settings
    placement = detect(with_index(environ), socket.gethostname(), settings.launch)
    setup(None, None, placement.node_rank, True, settings.telemetry.log_format == "json")
    return resolve_run_dir(settings, placement, time.time()), placement


def where(run_dir: Path) -> str:
    """Where a person finds what the run makes; the first log line says where its page is."""
    place, folder = address(run_dir), local_folder(run_dir)
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    logs = shown if folder == place else folder
    return f"run          {shown}\ncheckpoints  {shown}/checkpoints\nlogs         {logs}/log"
