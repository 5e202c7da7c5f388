"""The verbs for a run that is there: its checkpoints, its scores, its weights as a file, its report.

As in `cli`, which puts the verbs together, one imports what it needs when it is called.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import FAILED, FINISHED, ConfigError
from tandem.verbs.verb import Environment, Verb

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser, Settings

FORMATS = ("safetensors", "torch", "onnx", "hf")
OF_WEIGHTS = FORMATS[:2]
"""Formats that hold tensors by name; the others need the task, for its model."""


def checkpoints(options: "Namespace", environ: Environment) -> int:
    """`ls`, `verify` and `prune` of a run's checkpoints, without torch; 1 when one is damaged."""
    from tandem.checkpoint.listing import list_checkpoints, rule_of, table
    from tandem.checkpoint.locate import checkpoints_of
    from tandem.checkpoint.retention import Best
    from tandem.checkpoint.store import CheckpointStore

    directory = checkpoints_of(options.run_dir)
    if isinstance(directory, Path) and not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the run directory")
    store = CheckpointStore(directory)
    best = Best.parse(options.keep_best) if options.keep_best else None
    rule = rule_of(store, options.keep, best, options.keep_every)
    if options.action == "prune":
        sizes = store.sizes()
        done = "would remove" if options.dry_run else "removed"
        for step in store.prune(rule, options.dry_run):
            print(f"{done} step {step}, {sizes.get(step, 0):,} bytes")
        print(table(list_checkpoints(directory, rule=rule), directory))
        return FINISHED
    rows = list_checkpoints(directory, verify=options.action == "verify", rule=rule)
    print(table(rows, directory))
    return 1 if any(row.verified is False for row in rows) else FINISHED


def checkpoints_options(parser: "Parser") -> None:
    from tandem.config import BestText, Count

    parser.add_argument("action", choices=("ls", "verify", "prune"), help="list, check every byte, remove")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.option("--keep", Count, "newest checkpoints to keep; else as the run was told")
    parser.option("--keep-best", BestText, "keep the best one by this score, too")
    parser.option("--keep-every", Count, "keep one for every so many steps, too")
    parser.option("--dry-run", bool, "only say what prune would remove")


def report(options: "Namespace", environ: Environment) -> int:
    """One HTML file: RUN_DIR/report.html, or where --output says."""
    from tandem.checkpoint.storage.copies import local_folder
    from tandem.report.report import write_report
    from tandem.report.secrets import secrets_in

    run_dirs = [options.run_dir, *options.compare]
    output = options.output or local_folder(options.run_dir) / "report.html"
    write_report(run_dirs, output, secrets_in(environ))
    print(output)
    return FINISHED


def report_options(parser: "Parser") -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="other runs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of RUN_DIR/report.html")


def page(options: "Namespace", environ: Environment) -> int:
    """Serve the reports of runs until Ctrl-C."""
    from tandem.config.slices import MetricsConfig
    from tandem.report.access import load_access
    from tandem.report.secrets import secrets_in
    from tandem.report.serve import ReportServer, runs_in
    from tandem.signals import StopFlag

    access = load_access(MetricsConfig(metrics_token_file=options.token_file))
    if access.token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"--host {options.host} lets others read; give --token-file FILE as well")
    secrets = [*secrets_in(environ), access.token or ""]
    stop = StopFlag().install()
    try:
        server = ReportServer(runs_in(options.run_dirs), options.host, options.port, access, secrets)
    except OSError as error:
        raise ConfigError(str(error)) from error
    print(f"{server.url}/ (Ctrl-C ends it)", flush=True)
    server.serve(lambda: bool(stop))
    return FINISHED


def page_options(parser: "Parser") -> None:
    from tandem.config.fields import Port

    help_text = "runs, or folders of runs; default runs"
    parser.add_argument(
        "run_dirs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN_DIR", help=help_text
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens; default 127.0.0.1")
    parser.option("--port", Port, "its port", 9469)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="what readers have to know")


def track(options: "Namespace", environ: Environment) -> int:
    """Send a run to its tracker, or what is missing there."""
    from tandem.checkpoint.storage.copies import Copies, local_folder, make_folder
    from tandem.report import tracking
    from tandem.report.secrets import secrets_in
    from tandem.report.trackers import check
    from tandem.telemetry.journal import read_json

    folder, copies = local_folder(options.run_dir), Copies(options.run_dir)
    if not options.follow:
        if folder != options.run_dir:
            make_folder(folder)
        copies.fetch(folder)
    config = read_json(folder / "config.json")
    if not config:
        raise ConfigError(f"{options.run_dir} is no run: it has no config.json; give the run directory")
    name = tracking.chosen(config, options.tracker)
    check(name)
    with tracking.alone(folder, wait=options.follow):
        sending = tracking.Sending(folder, name, secrets_in(environ))
        if options.follow:
            return FINISHED if tracking.follow_launch(sending, name, config, folder) else FAILED
        print(sending.catch_up())
    copies.push()
    return FINISHED


def track_options(parser: "Parser") -> None:
    from tandem.report.trackers import TRACKERS

    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--tracker", choices=TRACKERS, help="mlflow or wandb; default the run's own")
    parser.option("--follow", bool, "until the standard input is closed, as a launch runs it")


def runs(options: "Namespace", environ: Environment) -> int:
    """What runs there are, without torch; with --clean those that left nothing go."""
    from tandem.report.runs import clean, find_runs, table

    found = find_runs(options.folder)
    if options.clean or options.dry_run:
        done = "would remove" if options.dry_run else "removed"
        for row in clean(found, options.dry_run):
            print(f"{done} {row.path}: {row.state}, no checkpoint, {row.bytes:,} bytes")
        found = find_runs(options.folder)
    print(table(found, options.folder))
    return FINISHED


def runs_options(parser: "Parser") -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="default runs"
    )
    text = "remove runs that ended, or were killed an hour ago, and left neither checkpoint nor other files"
    parser.option("--clean", bool, text)
    parser.option("--dry-run", bool, "only say what --clean would remove")


def kill(options: "Namespace", environ: Environment) -> int:
    """A signal to one rank or node of a run: how to break one's own run, and no other."""
    from tandem.launch.kill import kill as send

    if (options.rank is None) == (options.node is None):
        raise ConfigError(f"give --rank N or --node N: what of {options.run_dir} shall get the signal")
    kind, number = ("rank", options.rank) if options.node is None else ("node", options.node)
    print(send(options.run_dir, kind, number, options.signal))
    return FINISHED


def kill_options(parser: "Parser") -> None:
    from tandem.config import Natural

    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.option("--rank", Natural, "the rank, counted over all nodes")
    parser.option("--node", Natural, "the agent of a simulated node, and its ranks with it")
    names = ("KILL", "STOP", "CONT", "TERM", "INT")
    parser.add_argument("--signal", choices=names, default="KILL", help=f"{', '.join(names)}; default KILL")


def evaluate(options: "Namespace", environ: Environment) -> int:
    """The scores of a checkpoint, by as many ranks as there are."""
    from tandem.launch.variables import wait_passively

    wait_passively()
    from tandem.launch.scoring import evaluate as score

    return score(options.place, options.given, environ, options.json)


def evaluate_options(parser: "Parser") -> None:
    parser.add_argument("place", metavar="RUN", help="a run or one of its checkpoints; @STEP behind it")
    parser.option("--json", bool, "one line of JSON")


def export(options: "Namespace", environ: Environment) -> int:
    """The weights of a checkpoint, or its model, for programs without tandem."""
    if options.format in OF_WEIGHTS:
        if options.given:
            flag = next(iter(options.given.values())).name
            raise ConfigError(f"{flag} says nothing to --format {options.format}, which needs no task")
        from tandem.training.export import export as write

        print(write(options.place, options.format, options.output))
        return FINISHED
    from tandem.launch.scoring import settings_of
    from tandem.training.export_model import export_model

    def settings(info: Mapping[str, object]) -> "Settings":
        return settings_of(info, options.given, environ)

    print(export_model(options.place, options.format, options.output, settings))
    return FINISHED


def export_options(parser: "Parser") -> None:
    parser.add_argument("place", metavar="RUN", help="a run or one of its checkpoints; @STEP behind it")
    text = "default safetensors; onnx and hf (save_pretrained) hold the model, for which its task is asked"
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=text)
    help_text = "instead of ./RUN-step-STEP with the ending of the format; a folder for hf"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_text)


VERBS: Mapping[str, Verb] = {
    "checkpoints": Verb(
        checkpoints,
        "ls|verify|prune RUN_DIR",
        "look after the checkpoints of a run",
        checkpoints_options,
        takes_settings=False,
    ),
    "report": Verb(
        report,
        "RUN_DIR [--compare RUN_DIR...]",
        "one HTML file of a finished run, or of several side by side",
        report_options,
        takes_settings=False,
    ),
    "page": Verb(
        page,
        "[RUN_DIR...] [--port PORT]",
        "serve the reports of runs that are there",
        page_options,
        takes_settings=False,
    ),
    "track": Verb(
        track,
        "RUN_DIR [--tracker mlflow|wandb]",
        "send a run to a tracker, or what is missing there",
        track_options,
        takes_settings=False,
    ),
    "runs": Verb(
        runs,
        "[DIR] [--clean] [--dry-run]",
        "the runs in a folder: state, score, age and size",
        runs_options,
        takes_settings=False,
    ),
    "kill": Verb(
        kill,
        "RUN_DIR --rank N [--signal NAME]",
        "a signal to one rank (or --node) of a run on this machine, to see what happens",
        kill_options,
        takes_settings=False,
    ),
    "eval": Verb(
        evaluate,
        "RUN[@STEP] [--json] [settings]",
        "the scores of a checkpoint, by any number of ranks",
        evaluate_options,
    ),
    "export": Verb(
        export,
        "RUN[@STEP] [--format FORMAT] [settings]",
        "a checkpoint as a file for plain PyTorch, ONNX or transformers",
        export_options,
    ),
}
