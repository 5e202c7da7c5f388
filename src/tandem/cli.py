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
from typing import TYPE_CHECKING, NoReturn

from tandem import __version__
from tandem.errors import FINISHED, MISCONFIGURED, ConfigError, TandemError

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Settings
    from tandem.platforms.placement import Placement

log = logging.getLogger("tandem.cli")

Arguments = Sequence[str]
Environment = Mapping[str, str]

# Named, not imported: the agent's fork server has to start before anything imports torch.
RANK_FUNCTION = "tandem.training.run:run_rank"

HELP = """tandem: multi-node PyTorch training that survives, and tells you what it is doing.

  tandem launch [--nodes N] [settings]   train: finds the platform, starts this node's ranks, restarts them
  tandem train [settings]                train as the rank that the environment says (torchrun, or alone)
  tandem checkpoints ls|verify|prune DIR look after the checkpoints of a run
  tandem report DIR [--compare DIR...]   one HTML file of a finished run, or of several side by side
  tandem verify-resume [--trials N] [settings]   kill a run of this task, resume it, compare every bit
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
    from tandem.config import load
    from tandem.launch.node import resolve_run_dir
    from tandem.log import setup, wants_json
    from tandem.platforms.placement import detect
    from tandem.platforms.replica import with_index

    settings = load(arguments, environ).settings
    # Decided once and handed on: the ranks' own output is a file, whatever a person looks at.
    log_format = "json" if wants_json(settings.log_format) else "text"
    settings = settings.replace(log_format=log_format)
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
    from tandem.launch.node import run_this_node, simulate, with_port

    if placement.platform == "none":
        if settings.log_format == "text":
            print(where(settings), file=sys.stderr)
        if placement.nodes > 1:
            return simulate(settings, placement, arguments, environ, stop)
        placement = with_port(placement)
    state = environ.get("TANDEM_STATE_DIR")
    return run_this_node(settings, placement, RANK_FUNCTION, Path(state) if state else None, stop)


def _launch_replica(arguments: Arguments, environ: Environment) -> int:
    """`launch` in a container of Compose, which would start it again also where that cannot help."""
    from tandem.platforms.replica import note_end, stay_down_code

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
    """Where a person finds what the run makes; the first log line says where its page is."""
    run_dir = Path(str(settings.run_dir))
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    return "\n".join(
        [
            f"run          {shown}",
            f"checkpoints  {shown}/checkpoints",
            f"logs         {shown}/log",
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
    from tandem.launch.node import run_lone_rank
    from tandem.launch.workers import resolve

    return run_lone_rank(settings, placement, resolve(RANK_FUNCTION))


def checkpoints(arguments: Arguments, environ: Environment) -> int:
    """`ls`, `verify` and `prune` of a run's checkpoints, without torch; 1 when one is damaged."""
    from tandem.checkpoint.listing import list_checkpoints, rule_of, table
    from tandem.checkpoint.store import CheckpointStore

    asked = _checkpoint_arguments(arguments)
    directory: Path = asked.directory
    directory = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the run directory")
    store = CheckpointStore(directory)
    rule = rule_of(store, asked.keep, asked.keep_best, asked.keep_every)
    if asked.action == "prune":
        sizes = {step: store.size_bytes(step) for step in store.prune(rule, dry_run=True)}
        for step in store.prune(rule, asked.dry_run):
            print(
                f"{'would remove' if asked.dry_run else 'removed'} step {step}, {sizes.get(step, 0):,} bytes"
            )
        print(table(list_checkpoints(directory, rule=rule), directory))
        return FINISHED
    rows = list_checkpoints(directory, verify=asked.action == "verify", rule=rule)
    print(table(rows, directory))
    return 1 if any(row.verified is False for row in rows) else FINISHED


def _checkpoint_arguments(arguments: Arguments) -> "Namespace":
    from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError

    from tandem.checkpoint.retention import Best

    usage = "tandem checkpoints ls|verify|prune RUN_DIR [--keep N] [--keep-best METRIC] [--keep-every N]"

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message}; say what to do and where: {usage} [--dry-run]")

    def count(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= 1):
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
        return int(text)

    def best(text: str) -> Best:
        try:
            return Best.parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    parser = Parser(add_help=False, allow_abbrev=False, usage=SUPPRESS)
    parser.add_argument("action", choices=("ls", "verify", "prune"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--keep", type=count)
    parser.add_argument("--keep-best", type=best)
    parser.add_argument("--keep-every", type=count)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_intermixed_args(list(arguments))


def verify_resume(arguments: Arguments, environ: Environment) -> int:
    """The proof, on this machine, that a killed run of this task resumes to the same bits."""
    from tandem.config import load
    from tandem.platforms.placement import detect
    from tandem.signals import StopFlag

    rest = [
        part for word in arguments for part in (word.split("=") if word.startswith("--trials=") else [word])
    ]
    trials = environ.get("TANDEM_TRIALS") or "3"
    if "--trials" in rest:
        at = rest.index("--trials")
        trials = rest[at + 1] if at + 1 < len(rest) else ""
        del rest[at : at + 2]
    if not trials.isdecimal() or int(trials) < 1:
        raise ConfigError(f"--trials got {trials!r}, valid is a number of at least 1")
    settings = load(rest, environ).settings
    platform = detect(environ, socket.gethostname()).platform
    if platform != "none":
        raise ConfigError(f"verify-resume starts its own ranks, and this is a rank or node of {platform}")
    stop = StopFlag().install()
    from tandem.verify.resume import verify

    return verify(settings, rest, environ, int(trials), stop, lambda line: print(line, flush=True))


def report(arguments: Arguments, environ: Environment) -> int:
    """One HTML file: RUN_DIR/report.html, or where --output says."""
    from tandem.report.report import write_report

    rest, output = list(arguments), None
    if "--output" in rest:
        at = rest.index("--output")
        output = Path(rest[at + 1]) if at + 1 < len(rest) else None
        del rest[at : at + 2]
    compared = "--compare" in rest
    run_dirs = [Path(argument) for argument in rest if argument != "--compare"]
    unknown = [str(path) for path in run_dirs if str(path).startswith("-")]
    if not run_dirs or unknown or compared != (len(run_dirs) > 1):
        raise ConfigError(
            "say which run: tandem report RUN_DIR [--compare RUN_DIR...] [--output FILE]"
            + (f"; {unknown[0]} is no option" if unknown else "")
        )
    output = output or run_dirs[0] / "report.html"
    write_report(run_dirs, output)
    print(output)
    return FINISHED


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
    from tandem.verify.doctor import report

    print(report(load(arguments, environ).settings, environ))
    return FINISHED


def health(arguments: Arguments, environ: Environment) -> int:
    """Standard library only: the verdict on the heartbeat file."""
    from tandem.telemetry.health import main as health_main

    if arguments:
        print("tandem: health takes no arguments", file=sys.stderr)
        return MISCONFIGURED
    return health_main(environ)


VERBS: dict[str, Callable[[Arguments, Environment], int]] = {
    "launch": launch,
    "train": train,
    "checkpoints": checkpoints,
    "report": report,
    "verify-resume": verify_resume,
    "config": config,
    "doctor": doctor,
    "health": health,
}
