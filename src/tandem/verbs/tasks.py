"""The verbs for a task or a script: train it, begin one; is it sound, does it resume, which strategy suits?

As in `cli`, which puts the verbs together, one imports what it needs when it is called.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import FINISHED, ConfigError
from tandem.verbs.verb import Environment, Verb

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser

CHECK = (
    "check: {task}, 2 ranks on CPUs: two short runs, what each rank makes, and a run that is killed; "
    "about half a minute, more where a start or a step is slow"
)


def launch(options: "Namespace", environ: Environment) -> int:
    """Node level: this node's agent, or all nodes of a laptop."""
    from tandem.launch import command

    return command.launch(options.given, environ, options.program)


def train(options: "Namespace", environ: Environment) -> int:
    """Rank level: what the environment says, or alone."""
    from tandem.launch import command

    return command.train(options.given, environ)


def verify_resume(options: "Namespace", environ: Environment) -> int:
    """The proof, on this machine, that a killed run of this task or script resumes to the same bits."""
    from tandem.config import Count, as_flags, checked, resolve
    from tandem.signals import StopFlag

    trials = options.trials or checked(Count, "TANDEM_TRIALS", environ.get("TANDEM_TRIALS") or "3")
    settings = resolve(options.given, environ).settings
    _check_alone("verify-resume", environ)
    script = None
    if options.script is not None:
        from tandem.launch.program import check
        from tandem.script.job import Program

        script = Program("script", options.script)
        check(script, options.given)
    stop = StopFlag().install()
    from tandem.verify.resume import verify

    flags = as_flags(options.given)
    return verify(settings, flags, environ, trials, stop, lambda line: print(line, flush=True), script)


def _check_alone(verb: str, environ: Environment) -> None:
    from tandem.platforms.placement import detect

    platform = detect(environ, socket.gethostname()).platform
    if platform != "none":
        raise ConfigError(f"{verb} starts its own ranks, and this is a rank or node of {platform}")


def verify_resume_options(parser: "Parser") -> None:
    from tandem.config import Count

    parser.option("--trials", Count, "runs to kill; default 3, TANDEM_TRIALS")
    parser.add_argument("--script", metavar="FILE", help="a script with a loop of its own (not a task)")


def check(options: "Namespace", environ: Environment) -> int:
    """Is this task sound? What it makes, two short runs and a killed one, compared."""
    from tandem.config import Given, as_flags, resolve
    from tandem.signals import StopFlag

    given = {**options.given, **({"task": Given(options.file, "argument", "TASK")} if options.file else {})}
    settings = resolve(given, environ).settings
    _check_alone("check", environ)
    print(CHECK.format(task=settings.run.task), flush=True)  # before torch is imported, which takes seconds
    from tandem.verify.check import check as look

    stop = StopFlag().install()
    return look(settings, as_flags(given), environ, stop, lambda line: print(line, flush=True))


def check_options(parser: "Parser") -> None:
    text = "PATH/FILE.py, PATH/FILE.py:CLASS or PACKAGE.MODULE:CLASS; else as --task says"
    parser.add_argument("file", nargs="?", metavar="TASK", help=text)


def bench(options: "Namespace", environ: Environment) -> int:
    """Strategies side by side on this machine: pace, memory and loss, in rounds."""
    from tandem.config import as_flags, resolve
    from tandem.verify.bench import Wanted, compare

    settings = resolve(options.given, environ).settings
    _check_alone("bench", environ)
    wanted = Wanted.of(options.compare, options.rounds, options.json)
    return compare(settings, as_flags(options.given), environ, wanted, lambda line: print(line, flush=True))


def bench_options(parser: "Parser") -> None:
    from tandem.config import Count

    parser.add_argument("--compare", metavar="A,B", help="strategies; default all")
    parser.option("--rounds", Count, "runs of each, in turn; default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")


def init(options: "Namespace", environ: Environment) -> int:
    """The files of a project around a task of one's own."""
    from tandem.tasks.init import init as write

    print(write(options.folder))
    return FINISHED


def init_options(parser: "Parser") -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or one without these files")


VERBS: Mapping[str, Verb] = {
    "launch": Verb(
        launch,
        "[settings] [SCRIPT [ARGUMENTS]]",
        "train a task, or run a script as torchrun does: start this node's ranks, restart them",
    ),
    "train": Verb(
        train, "[settings]", "train a task as the rank that the environment says (torchrun, or alone)"
    ),
    "init": Verb(
        init,
        "DIR",
        "a project of one's own: task, test, image, Compose and Kubernetes files",
        init_options,
        takes_settings=False,
    ),
    "check": Verb(
        check,
        "[TASK] [settings]",
        "is this task sound? its data, model and loss on two ranks, and a killed run",
        check_options,
    ),
    "verify-resume": Verb(
        verify_resume,
        "[--script FILE] [settings]",
        "kill a run of this task or script, resume it, compare every bit",
        verify_resume_options,
    ),
    "bench": Verb(
        bench,
        "[--compare A,B] [settings]",
        "strategies side by side: pace, memory and loss",
        bench_options,
    ),
}
