"""The verbs. Reads the environment once and passes it on; imports what a verb needs when it is called.

`tandem --help` and `tandem health` therefore need no torch and take milliseconds.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tandem import __version__
from tandem.errors import FAILED, FINISHED, ConfigError, TandemError
from tandem.verbs import runs, tasks

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser

Environment = Mapping[str, str]

HELP = """tandem: multi-node PyTorch training that survives, and tells you what it is doing.

{verbs}
  tandem --version

`tandem VERB --help` lists what a verb takes, `tandem help TOPIC` tells of one setting (help epochs), a group
of them (help settings) or the exit codes (help exit-codes). Settings are flags (--epochs 3), variables
(TANDEM_EPOCHS=3), keys of a --config FILE.toml or lines of .env, in this order of precedence.
Start here: tandem launch --nodes 2
"""


class Verb(NamedTuple):
    """What a verb runs, its line in the help, and what it takes besides settings."""

    run: "Callable[[Namespace, Environment], int]"
    usage: str
    summary: str
    add_options: "Callable[[Parser], None] | None" = None
    takes_settings: bool = True


def main() -> None:
    """Entry of the console script; leaves with the exit code of the verb."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    environ = dict(os.environ)  # with the job's secret, which a launch takes out
    try:
        code = run(verb, sys.argv[2:], os.environ)
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        code = error.exit_code
        if verb == "launch" and isinstance(error, ConfigError):
            from tandem.signals import left_at_stop_signals

            with left_at_stop_signals(code):
                from tandem.launch.early import tell_others

                tell_others(sys.argv[2:], environ, error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        if "torch" in sys.modules:  # it may be another pipe than that of who reads us
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has read enough
        code = 141  # as of a program that SIGPIPE ends
    with suppress(OSError):  # of a terminal that was closed
        sys.stdout.flush()
        sys.stderr.flush()
    if "torch" in sys.modules:
        os._exit(code)  # threads of gloo and of the store abort some interpreters at a normal exit
    sys.exit(code)


def run(verb: str, words: Sequence[str], environ: Environment) -> int:
    """Call the verb; raises TandemError with one line for the user."""
    if verb == "help" and words:
        print(_help_on(words[0]), end="")
        return FINISHED
    if verb in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(_line(name) for name in VERBS)), end="")
        return FINISHED
    if verb in ("--version", "version"):
        print(f"tandem {__version__}")
        return FINISHED
    if verb not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean `tandem {near[0]}`?" if near else "see `tandem --help`"
        raise ConfigError(f"unknown verb {verb!r}; valid are {', '.join(VERBS)}; {hint}")
    program = None
    if verb == "launch":  # whose program's words are its own
        from tandem.launch.program import split

        words, program = split(words)
    if "-h" in words or "--help" in words:
        print(parser_of(verb).format_help(), end="")
        return FINISHED
    if verb == "health" and not words:  # asked every few seconds, by probes: it builds no parser
        return health(None, environ)
    options = parser_of(verb).read(words)
    options.program = program
    return VERBS[verb].run(options, environ)


def parser_of(verb: str) -> "Parser":
    """The parser of one verb, which also makes its help."""
    from tandem.config import Parser

    _, usage, summary, add_options, takes_settings = VERBS[verb]
    parser = Parser(verb, usage, summary, takes_settings)
    if add_options is not None:
        add_options(parser)
    return parser


def _help_on(topic: str) -> str:
    if topic in VERBS:
        return parser_of(topic).format_help()
    from tandem.config.topics import told

    return told(topic, list(VERBS))


def _line(verb: str) -> str:
    command = f"tandem {verb} {VERBS[verb].usage}"
    return f"  {command:<47} {VERBS[verb].summary}"


def launch(options: "Namespace", environ: Environment) -> int:
    """Node level: this node's agent, or all nodes of a laptop."""
    from tandem.launch import command

    return command.launch(options.given, environ, options.program)


def train(options: "Namespace", environ: Environment) -> int:
    """Rank level: what the environment says, or alone."""
    from tandem.launch import command

    return command.train(options.given, environ)


def config(options: "Namespace", environ: Environment) -> int:
    """Every value, and with --explain where it came from."""
    from tandem.config import as_toml, explain, markdown, resolve

    if options.markdown:
        print(markdown(), end="")
        return FINISHED
    loaded = resolve(options.given, environ)
    for note in loaded.notes:
        print(f"tandem: {note}", file=sys.stderr)
    print(explain(loaded) if options.explain else as_toml(loaded.settings).rstrip())
    return FINISHED


def _config_options(parser: "Parser") -> None:
    parser.option("--explain", bool, "where every value comes from, instead of a file that --config reads")
    parser.option("--markdown", bool, "the tables of docs/configuration.md")


def doctor(options: "Namespace", environ: Environment) -> int:
    """Versions, what this place offers, and what is wrong with it: 1 where a check fails, else 0."""
    from tandem.config import resolve
    from tandem.verify.doctor import diagnose

    found = diagnose(resolve(options.given, environ).settings, environ)
    print(found.as_json() if options.json else found.as_text())
    return FAILED if found.state == "fail" else FINISHED


def _doctor_options(parser: "Parser") -> None:
    parser.option("--json", bool, "one line of JSON")


def completion(options: "Namespace", environ: Environment) -> int:
    """A script that completes verbs, flags and words at a Tab."""
    from tandem.config.completion import script

    parsers = {verb: parser_of(verb) for verb in VERBS}
    print(script(options.shell, parsers, {verb: each.summary for verb, each in VERBS.items()}), end="")
    return FINISHED


def _completion_options(parser: "Parser") -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="what the script is for")


def health(_: "Namespace | None", environ: Environment) -> int:
    """Standard library only: the verdict on the heartbeat file."""
    from tandem.telemetry.health import main as health_main

    return health_main(environ)


VERBS: dict[str, Verb] = {
    "launch": Verb(
        launch,
        "[settings] [SCRIPT [ARGUMENTS]]",
        "train a task, or run a script as torchrun does: start this node's ranks, restart them",
    ),
    "train": Verb(
        train, "[settings]", "train a task as the rank that the environment says (torchrun, or alone)"
    ),
    "init": Verb(
        tasks.init,
        "DIR",
        "a project of one's own: task, test, image, Compose and Kubernetes files",
        tasks.init_options,
        takes_settings=False,
    ),
    "checkpoints": Verb(
        runs.checkpoints,
        "ls|verify|prune RUN_DIR",
        "look after the checkpoints of a run",
        runs.checkpoints_options,
        takes_settings=False,
    ),
    "report": Verb(
        runs.report,
        "RUN_DIR [--compare RUN_DIR...]",
        "one HTML file of a finished run, or of several side by side",
        runs.report_options,
        takes_settings=False,
    ),
    "page": Verb(
        runs.page,
        "[RUN_DIR...] [--port PORT]",
        "serve the reports of runs that are there",
        runs.page_options,
        takes_settings=False,
    ),
    "track": Verb(
        runs.track,
        "RUN_DIR [--tracker mlflow|wandb]",
        "send a run to a tracker, or what is missing there",
        runs.track_options,
        takes_settings=False,
    ),
    "runs": Verb(
        runs.runs,
        "[DIR] [--clean] [--dry-run]",
        "the runs in a folder: state, score, age and size",
        runs.runs_options,
        takes_settings=False,
    ),
    "kill": Verb(
        runs.kill,
        "RUN_DIR --rank N [--signal NAME]",
        "a signal to one rank (or --node) of a run on this machine, to see what happens",
        runs.kill_options,
        takes_settings=False,
    ),
    "eval": Verb(
        runs.evaluate,
        "RUN[@STEP] [--json] [settings]",
        "the scores of a checkpoint, by any number of ranks",
        runs.evaluate_options,
    ),
    "export": Verb(
        runs.export,
        "RUN[@STEP] [--format FORMAT] [settings]",
        "a checkpoint as a file for plain PyTorch, ONNX or transformers",
        runs.export_options,
    ),
    "verify-resume": Verb(
        tasks.verify_resume,
        "[--script FILE] [settings]",
        "kill a run of this task or script, resume it, compare every bit",
        tasks.verify_resume_options,
    ),
    "check": Verb(
        tasks.check,
        "[TASK] [settings]",
        "is this task sound? its data, model and loss on two ranks, and a killed run",
        tasks.check_options,
    ),
    "bench": Verb(
        tasks.bench,
        "[--compare A,B] [settings]",
        "strategies side by side: pace, memory and loss",
        tasks.bench_options,
    ),
    "config": Verb(
        config, "[--explain] [settings]", "every setting, its value and where it comes from", _config_options
    ),
    "doctor": Verb(
        doctor,
        "[--json] [settings]",
        "what is wrong here: names, port, volume, clock...; versions, GPUs",
        _doctor_options,
    ),
    "completion": Verb(
        completion, "bash|zsh|fish", "a script for your shell's Tab key", _completion_options, False
    ),
    "health": Verb(health, "", "is the run making progress? (for probes)", None, False),
}
