"""The verbs for a task or script: train it, create it, test it, prove its resume, compare strategies.

Like `cli`, which collects the verbs, this module imports what it needs when a verb is called.
"""

import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import FINISHED, ConfigError
from tandem.verbs.verb import JSON, Environment, Verb, print_json, verbosity_options

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser, Settings
    from tandem.config.sources import Loaded
    from tandem.script.job import Program

CHECK = (
    "check: {task}, 2 ranks on CPUs: two short runs, a comparison of the ranks, and a killed run; "
    "about half a minute, longer if startup or steps are slow"
)


def launch(options: "Namespace", environ: Environment) -> int:
    """Run this node's agent, or all simulated nodes of a laptop."""
    from tandem.launch import command

    return command.launch(options.given, environ, options.program)


def train(options: "Namespace", environ: Environment) -> int:
    """Run a single rank: at the position that the environment gives, or alone."""
    from tandem.launch import command

    return command.train(options.given, environ)


def verify_resume(options: "Namespace", environ: Environment) -> int:
    """Prove on this machine that a killed run of this task or script resumes to the same bits."""
    from tandem.config import Count, as_flags, checked, resolve
    from tandem.launch.program_arguments import to_verify
    from tandem.signals import StopFlag

    # A mistake in the script's arguments is reported before the settings are read.
    script = to_verify(options.script, options.program, options.given)
    if script is not None and script.kind == "command":
        return _audit(options, script, environ)
    trials = options.trials or checked(Count, "TANDEM_TRIALS", environ.get("TANDEM_TRIALS") or "3")
    settings = _announce_code(resolve(options.given, environ))
    environ = _on_this_host("verify-resume", environ)
    stop = StopFlag().install()
    # Imported after the flag is installed: a signal during slow imports must count as a stop.
    from tandem.verify.resume import verify

    say = _printer(options.json)
    flags = as_flags(options.given)
    code, found = verify(settings, flags, environ, trials, stop, say, script)
    if options.json:
        print_json(found)
    return code


def _audit(options: "Namespace", program: "Program", environ: Environment) -> int:
    """Audit a command that needs no tandem. Raises ConfigError."""
    import re

    from tandem.config import Count, checked
    from tandem.signals import StopFlag

    for given in options.given.values():
        if given.name != "--nproc":
            raise ConfigError(f"{given.name} has no effect on a command; its own arguments follow {program}")
    if options.trials:
        raise ConfigError("--trials has no effect on a command; use --kills")
    nproc = checked(Count, "--nproc", options.given["nproc"].text) if options.given else 1
    try:
        pattern = re.compile(options.log, re.MULTILINE) if options.log else None
    except re.error as error:
        raise ConfigError(
            f"--log: {options.log!r} is no regular expression: {error}; "
            r"expected a pattern such as 'step (?P<step>\d+) loss (?P<loss>\S+)'"
        ) from error
    stop = StopFlag().install()
    # Imported after the flag is installed: a signal during slow imports must count as a stop.
    from tandem.verify.audit import AuditOptions, audit

    command = (program.target, *program.arguments)
    one = options.kill == "rank"
    asked = AuditOptions(command, options.launcher, nproc, options.kills, options.outputs, pattern, one)
    found = audit(asked, environ, stop, _printer(options.json))
    if options.json:
        print_json(found.as_json(asked))
    return found.exit_code


def _printer(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints progress, on standard error if standard output is for JSON."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _announce_code(loaded: "Loaded") -> "Settings":
    """Return the settings; first print whose code is about to run if a file names the task.

    Raises ConfigError.
    """
    from tandem.config.task_names import untyped_task_note

    if note := untyped_task_note(loaded):
        # Flushed before the import, which may crash or exit the process.
        print(f"tandem: {note}", file=sys.stderr, flush=True)
    return loaded.settings


def _on_this_host(verb: str, environ: Environment) -> Environment:
    from tandem.platforms.detection import on_this_host

    return on_this_host(verb, environ, socket.gethostname())


def verify_resume_options(parser: "Parser") -> None:
    from tandem.config import Count

    parser.option("--trials", Count, "number of runs to kill; default 3 or TANDEM_TRIALS")
    parser.add_argument(
        "--script", metavar="FILE", help="the same as the script as a word; its arguments follow --"
    )
    text = "after -- COMMAND, a program without tandem: what starts it; default none"
    parser.add_argument("--launcher", choices=("none", "torchrun", "accelerate"), default="none", help=text)
    parser.option("--kills", Count, "after -- COMMAND: number of runs to kill", 3)
    text = "after -- COMMAND: kill all its processes, or one rank; default job"
    parser.add_argument("--kill", choices=("job", "rank"), default="job", help=text)
    text = "after -- COMMAND: files to compare, may be repeated; default all that it writes"
    parser.add_argument("--outputs", metavar="GLOB", action="append", default=[], help=text)
    text = "after -- COMMAND: regular expression for its log lines, with groups such as (?P<step>...)"
    parser.add_argument("--log", metavar="PATTERN", help=text)
    parser.option("--json", bool, JSON)


def check(options: "Namespace", environ: Environment) -> int:
    """Test a task: its return values, and that two short runs and a killed one end with the same bits."""
    from tandem.config import Given, as_flags, resolve
    from tandem.signals import StopFlag

    # Checked by reading the file: importing such a script would start its training.
    if options.file and options.file.endswith(".py"):
        from tandem.launch.program_arguments import is_custom_loop

        if is_custom_loop(Path(options.file)):
            raise ConfigError(
                f"{options.file} is a script that calls tandem.start(); `tandem check` tests tasks; "
                f"use `tandem verify-resume --nproc 2 {options.file}`"
            )
    # The argument wins over --task, because it names the task that this command tests.
    given = {**options.given, **({"task": Given(options.file, "argument", "TASK")} if options.file else {})}
    settings = _announce_code(resolve(given, environ))
    environ = _on_this_host("check", environ)
    say = _printer(options.json)
    say(CHECK.format(task=settings.run.task))  # before torch is imported, which takes seconds
    from tandem.verify.check import as_json
    from tandem.verify.check import check as look

    code, found = look(settings, as_flags(given), environ, StopFlag().install(), say)
    if options.json:
        print_json(as_json(settings, found))
    return code


def check_options(parser: "Parser") -> None:
    text = "PATH/FILE.py, PATH/FILE.py:CLASS or PACKAGE.MODULE:CLASS; default: --task"
    parser.add_argument("file", nargs="?", metavar="TASK", help=text)
    parser.option("--json", bool, JSON)


def bench(options: "Namespace", environ: Environment) -> int:
    """Compare strategies on this machine, in rounds: throughput, memory and loss."""
    from tandem.config import as_flags, resolve
    from tandem.verify.bench import BenchOptions, compare

    settings = _announce_code(resolve(options.given, environ))
    environ = _on_this_host("bench", environ)
    chosen = BenchOptions.of(options.compare, options.rounds, options.output)
    code, found = compare(settings, as_flags(options.given), environ, chosen, _printer(options.json))
    if options.json:
        print_json(found)
    return code


def bench_options(parser: "Parser") -> None:
    from tandem.config import Count

    parser.add_argument("--compare", metavar="A,B", help="strategies to compare; default all")
    parser.option("--rounds", Count, "runs of each strategy, in turn; default 3")
    parser.option("--json", bool, JSON)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write this JSON to a file")


def demo(options: "Namespace", environ: Environment) -> int:
    """Train on two simulated nodes, kill a rank, and report the recovery."""
    from tandem.signals import StopFlag
    from tandem.verify.demo import demo as show

    environ = _on_this_host("demo", environ)
    # In the directory of an earlier demo, the run would be complete already.
    run_dir = options.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    return show(run_dir, environ, StopFlag().install(), lambda line: print(line, flush=True))


def demo_options(parser: "Parser") -> None:
    parser.add_argument("--run-dir", type=Path, metavar="PATH", help="run directory; default runs/demo-TIME")


def init(options: "Namespace", environ: Environment) -> int:
    """Write the files of a new project with its own task."""
    from tandem.tasks.init import chosen
    from tandem.tasks.init import init as write

    print(write(options.folder, chosen(options.compose, options.slurm), options.kubernetes))
    return FINISHED


def init_options(parser: "Parser") -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a new directory, or one without these files"
    )
    kinds = ("pytorchjob", "trainjob", "jobset", "job")
    text = "kind of job in k8s/; default pytorchjob"
    parser.add_argument("--kubernetes", choices=kinds, default=kinds[0], help=text)
    parser.option("--compose", bool, "the files for Docker Compose, and not those for Kubernetes")
    parser.option("--slurm", bool, "also a batch script for Slurm, train.sbatch")


VERBS: Mapping[str, Verb] = {
    "launch": Verb(
        launch,
        "[settings] [SCRIPT [ARGUMENTS]]",
        "train a task or a script on this node, and restart its ranks after failures",
        verbosity_options,
    ),
    "train": Verb(
        train, "[settings]", "train a task as one rank, alone or under torchrun", verbosity_options
    ),
    "demo": Verb(
        demo,
        "[--run-dir PATH]",
        "train on two simulated nodes, kill a rank, and watch the recovery",
        demo_options,
    ),
    "init": Verb(
        init,
        "DIR [--kubernetes KIND]",
        "create a project: task, test, image, Compose and Kubernetes files",
        init_options,
    ),
    "check": Verb(
        check,
        "[TASK] [settings]",
        "test a task: its data, model and loss on two ranks, and a killed run",
        check_options,
    ),
    "verify-resume": Verb(
        verify_resume,
        "[settings] [SCRIPT [ARGUMENTS] | -- COMMAND]",
        "kill a run, resume it, and compare every bit",
        verify_resume_options,
    ),
    "bench": Verb(
        bench, "[--compare A,B] [settings]", "compare strategies: speed, memory and loss", bench_options
    ),
}
