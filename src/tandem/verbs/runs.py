"""The verbs for existing runs: checkpoints, scores, exports, reports, trackers and signals.

Like `cli`, which collects the verbs, this module imports what it needs when a verb is called.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import FAILED, FINISHED, ConfigError
from tandem.verbs.verb import JSON, Environment, Verb, print_json, verbosity_options

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser, Settings
    from tandem.training.weights import SavedCheckpoint

FORMATS = ("safetensors", "torch", "dcp", "onnx", "hf")
LONGEST_LINE = 400
OF_WEIGHTS = FORMATS[:3]
"""Formats that contain tensors by name. The others contain the model, which its task builds."""


def checkpoints(options: "Namespace", environ: Environment) -> int:
    """List, verify or prune a run's checkpoints, without torch; return 1 if one is damaged."""
    from tandem.checkpoint.decision import checkpoints_of
    from tandem.checkpoint.listing import as_json, list_checkpoints, rule_of, table
    from tandem.checkpoint.retention import Best

    store = checkpoints_of(options.run_dir)
    # An address has no directories to test.
    if isinstance(store.directory, Path) and not store.directory.is_dir():
        raise ConfigError(f"{store.directory} is not a directory; give the run directory")
    best = Best.parse(options.keep_best) if options.keep_best else None
    rule = rule_of(store, options.keep, best, options.keep_every)
    removed: list[dict[str, int]] = []
    if options.action == "prune":
        # Measured before the checkpoints are removed.
        sizes = store.sizes()
        done = "would remove" if options.dry_run else "removed"
        for step in store.prune(rule, options.dry_run):
            removed.append({"step": step, "bytes": sizes.get(step, 0)})
            if not options.json:
                print(f"{done} step {step}, {sizes.get(step, 0):,} bytes")
    # The same rule applies to `ls`, so it shows what a prune would delete.
    rows = list_checkpoints(store, verify=options.action == "verify", rule=rule)
    if options.json:
        print_json({**as_json(rows, store), "removed": removed, "dry_run": options.dry_run})
    else:
        print(table(rows, store))
    # prune has done what it was asked for, even if a checkpoint is damaged.
    is_damaged = options.action != "prune" and any(row.verified is False for row in rows)
    return FAILED if is_damaged else FINISHED


def checkpoints_options(parser: "Parser") -> None:
    from tandem.config import BestText, Count

    parser.add_argument(
        "action",
        choices=("ls", "verify", "prune"),
        help="ls: list; verify: check every byte; prune: delete old ones",
    )
    # Path makes one slash of the two in an address, and `config.address` accepts both spellings.
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.option("--keep", Count, "number of newest checkpoints to keep; default: as set for the run")
    parser.option("--keep-best", BestText, "also keep the best checkpoint by this score")
    parser.option("--keep-every", Count, "also keep one checkpoint every N steps")
    parser.option("--dry-run", bool, "only show what prune would delete")
    parser.option("--json", bool, JSON)


def report(options: "Namespace", environ: Environment) -> int:
    """Write one HTML file: RUN_DIR/report.html, or what --output names."""
    from tandem import layout
    from tandem.config.address import secrets_in
    from tandem.log import printable
    from tandem.report.report import write_report
    from tandem.run.directory import RunDir

    run_dirs = [options.run_dir, *options.compare]
    output = options.output or RunDir(options.run_dir).folder / layout.REPORT
    # A report is made to be passed to others, and messages of a run may contain secrets of its environment.
    _warn(write_report(run_dirs, output, secrets_in(environ)))
    print(printable(str(output)))
    return FINISHED


def _warn(problems: Sequence[str]) -> None:
    """Print one line per problem on standard error."""
    for problem in problems:
        print(f"tandem: {problem}", file=sys.stderr)


def report_options(parser: "Parser") -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="runs to compare with"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="output file; default RUN_DIR/report.html"
    )


def page(options: "Namespace", environ: Environment) -> int:
    """Serve the reports of runs until Ctrl-C."""
    from tandem.config.address import secrets_in
    from tandem.config.slices import MetricsConfig
    from tandem.report.report import ReportServer, runs_in
    from tandem.report.web import load_access
    from tandem.signals import StopFlag

    access = load_access(MetricsConfig(metrics_token_file=options.token_file))
    # Reports contain commands and settings of the runs, so other machines need a token.
    if access.token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"--host {options.host} lets other machines read the runs; add --token-file FILE")
    # The page must not show its own token, which is in no variable.
    secrets = [*secrets_in(environ), access.token or ""]
    # With the flag, a signal ends the loop in serve() and not this process.
    stop = StopFlag().install()
    try:
        server = ReportServer(runs_in(options.run_dirs), options.host, options.port, access, secrets)
    except OSError as error:
        # The port is in use, or the address belongs to another machine: the user can choose another one.
        raise ConfigError(str(error)) from error
    print(f"{server.url}/ (Ctrl-C ends it)", flush=True)
    _warn(server.problems())
    server.serve(lambda: bool(stop))
    return FINISHED


def page_options(parser: "Parser") -> None:
    from tandem.config.fields import Port

    help_text = "runs, or directories of runs; default runs"
    parser.add_argument(
        "run_dirs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN_DIR", help=help_text
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    parser.option("--port", Port, "port to listen on", 19470)
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token that readers must send"
    )


def track(options: "Namespace", environ: Environment) -> int:
    """Send a run, or the rows that are missing there, to its tracker."""
    from tandem import layout
    from tandem.config.address import secrets_in
    from tandem.log import printable
    from tandem.report import otel, tracking
    from tandem.report.otel import OTEL
    from tandem.report.tracking import check_tracker
    from tandem.run.directory import RunDir

    run = RunDir(options.run_dir)
    is_otel = options.tracker == OTEL
    # With --follow, the launch itself writes the run's files here, and those at the address are older.
    if not options.follow:
        if not run.is_here:
            run.make_folder()
        run.mirror.fetch()
    files = run.files()
    config = files.read(layout.CONFIG)
    if not config:
        why = "; ".join(files.problems) or "it has no config.json"
        raise ConfigError(f"{options.run_dir} is not a run: {why}; give the run directory")
    name = "OpenTelemetry" if is_otel else tracking.chosen(config, options.tracker)
    if not is_otel:
        check_tracker(name)
    elif not (run.logs / layout.OTEL_SPANS).exists() and not options.follow:
        raise ConfigError(
            f"{options.run_dir} has nothing for OpenTelemetry; set OTEL_EXPORTER_OTLP_ENDPOINT for its launch"
        )
    # Two senders would send rows twice. With --follow, that of a killed launch may need time to end. A
    # tracker and OpenTelemetry may be sent to at the same time, so they lock different directories.
    with tracking.exclusive_sender(run.logs if is_otel else run.folder, wait=options.follow):
        secrets = secrets_in(environ)
        sending = (
            otel.OtelUpload(run, secrets, environ) if is_otel else tracking.TrackerUpload(run, name, secrets)
        )
        if options.follow:
            return FINISHED if tracking.follow_launch(sending, name, config, run) else FAILED
        print(printable(sending.catch_up(), LONGEST_LINE))
        _warn([printable(f"{options.run_dir}: {each}", LONGEST_LINE) for each in sending.files.problems])
    # The next upload may be from another machine, which needs the position in tracker.json.
    run.push()
    return FINISHED


def track_options(parser: "Parser") -> None:
    from tandem.report.otel import OTEL
    from tandem.report.tracking import TRACKERS

    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    text = "mlflow, wandb or otel (OpenTelemetry); default: the tracker of the run"
    parser.add_argument("--tracker", choices=(*TRACKERS, OTEL), help=text)
    parser.option("--follow", bool, "internal: keep sending until standard input is closed")


def runs(options: "Namespace", environ: Environment) -> int:
    """List runs, without torch; with --clean, remove those that left nothing."""
    from tandem.log import printable
    from tandem.paths import volume_time
    from tandem.report.runs import as_json, clean, find_runs, table, unreadable

    if options.goodput and (options.clean or options.dry_run):
        raise ConfigError("--goodput shows runs and --clean removes them; type two commands")
    now = None
    if options.clean or options.dry_run:
        with suppress(OSError):  # reported by `find_runs`, or by the removal
            now = volume_time(options.folder)
    found, removed = find_runs(options.folder, now), list[dict[str, object]]()
    if options.clean or options.dry_run:
        done = "would remove" if options.dry_run else "removed"
        for row in clean(found, options.dry_run):
            removed.append({"path": str(row.path), "bytes": row.bytes})
            if not options.json:
                # The name of a directory may contain control characters for a terminal.
                print(printable(f"{done} {row.path}: {row.state}, no checkpoint, {row.bytes:,} bytes"))
        found = find_runs(options.folder)
    if options.goodput:
        from tandem.report import goodput

        if options.json:
            print_json(goodput.as_json(found, options.folder))
        else:
            print(goodput.table(found, options.folder))
    elif options.json:
        print_json({**as_json(found, options.folder), "removed": removed, "dry_run": options.dry_run})
    else:
        print(table(found, options.folder))
    # Runs are private to their user, so those of a colleague look like no run at all.
    if hidden := unreadable(options.folder):
        names = f"{', '.join(hidden[:8])}{', ...' if len(hidden) > 8 else ''}"
        line = f"not listed, because this user may not read them: {names}; ask their owner for access"
        print(printable(line, LONGEST_LINE), file=sys.stderr)
    return FINISHED


def runs_options(parser: "Parser") -> None:
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs"),
        metavar="DIR",
        help="directory of runs; default runs",
    )
    text = "remove runs that ended (or were killed an hour ago) without a checkpoint or other files"
    parser.option("--clean", bool, text)
    parser.option("--dry-run", bool, "only show what --clean would remove")
    parser.option("--goodput", bool, "show where the wall time of each run went, and what restarts cost")
    parser.option("--json", bool, JSON)


def kill(options: "Namespace", environ: Environment) -> int:
    """Send a signal to one rank or node of a run, for failure tests."""
    from tandem.launch.kill import kill as send
    from tandem.run.directory import RunDir

    # Ranks and nodes count from 0, so 0 must not read as missing.
    if (options.rank is None) == (options.node is None):
        raise ConfigError(
            f"give either --rank N or --node N: which part of {options.run_dir} gets the signal"
        )
    kind, number = ("rank", options.rank) if options.node is None else ("node", options.node)
    print(send(RunDir(options.run_dir), kind, number, options.signal))
    return FINISHED


def kill_options(parser: "Parser") -> None:
    from tandem.config import Natural

    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.option("--rank", Natural, "global rank")
    parser.option("--node", Natural, "simulated node: its agent and all its ranks")
    names = ("KILL", "STOP", "CONT", "TERM", "INT")
    parser.add_argument("--signal", choices=names, default="KILL", help=f"{', '.join(names)}; default KILL")


def evaluate(options: "Namespace", environ: Environment) -> int:
    """Evaluate a checkpoint, with any number of ranks."""
    from tandem.launch.torch_variables import wait_passively

    # torch reads these variables when the next line imports it.
    wait_passively()
    from tandem.launch.eval_command import evaluate as score
    from tandem.platforms.detection import outside_steps

    return score(options.source, options.given, outside_steps(environ), options.json)


def evaluate_options(parser: "Parser") -> None:
    parser.add_argument("source", metavar="RUN", help="a run, or one of its checkpoints as RUN@STEP")
    parser.option("--json", bool, JSON)
    verbosity_options(parser)


def export(options: "Namespace", environ: Environment) -> int:
    """Export the weights of a checkpoint, or its model, for programs without tandem."""
    from tandem.log import printable

    if options.format in OF_WEIGHTS:
        if options.given:
            flag = next(iter(options.given.values())).name
            raise ConfigError(
                f"{flag} has no effect with --format {options.format}, which needs no task; remove it"
            )
        from tandem.training.export import export as write

        print(printable(write(options.source, options.format, options.output)))
        return FINISHED
    from tandem.launch.eval_command import settings_of
    from tandem.training.export import export_model

    def settings(saved: "SavedCheckpoint") -> "Settings":
        # The manifest names the task, so the settings are known only when the checkpoint has been read.
        found, note = settings_of(saved.directory, saved.info, options.given, environ)
        _warn([note] if note else [])
        return found

    print(printable(export_model(options.source, options.format, options.output, settings)))
    return FINISHED


def export_options(parser: "Parser") -> None:
    parser.add_argument("source", metavar="RUN", help="a run, or one of its checkpoints as RUN@STEP")
    text = "default safetensors; onnx and hf (save_pretrained) export the model, built by its task"
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=text)
    help_text = (
        "output file (directory for hf and dcp); default RUN-step-STEP with the extension of the format"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_text)


VERBS: Mapping[str, Verb] = {
    "checkpoints": Verb(
        checkpoints,
        "ls|verify|prune RUN_DIR [--json]",
        "list, verify or prune a run's checkpoints",
        checkpoints_options,
    ),
    "report": Verb(
        report,
        "RUN_DIR [--compare RUN_DIR...]",
        "write an HTML report of one run, or of several side by side",
        report_options,
    ),
    "page": Verb(
        page, "[RUN_DIR...] [--port PORT]", "serve the pages of the runs in a directory", page_options
    ),
    "track": Verb(
        track,
        "RUN_DIR [--tracker mlflow|wandb|otel]",
        "upload a run, or the missing part of it, to MLflow, W&B or OpenTelemetry",
        track_options,
    ),
    "runs": Verb(
        runs,
        "[DIR] [--json] [--goodput] [--clean] [--dry-run]",
        "list runs: state, score, age and size",
        runs_options,
    ),
    "kill": Verb(
        kill,
        "RUN_DIR --rank N [--signal NAME]",
        "send a signal to one rank or node of a local run (fault injection)",
        kill_options,
    ),
    "eval": Verb(
        evaluate,
        "RUN[@STEP] [--json] [settings]",
        "evaluate a checkpoint with any number of ranks",
        evaluate_options,
    ),
    "export": Verb(
        export,
        "RUN[@STEP] [--format FORMAT] [settings]",
        "convert a checkpoint for plain PyTorch, ONNX or transformers",
        export_options,
    ),
}
