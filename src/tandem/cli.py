"""Dispatch to the verbs: read the environment once, pass it on, import what a verb needs on the call.

`tandem --help` and `tandem health` therefore need no torch and take milliseconds.
"""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tandem import __version__
from tandem.errors import FAILED, FINISHED, ConfigError, TandemError
from tandem.text import did_you_mean, nearest
from tandem.verbs import host, live, runs, tasks
from tandem.verbs.verb import Environment, Verb

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
TRAINING = ("launch", "train")
"""Verbs whose exit code is that of the training, whatever becomes of their output."""
HELP = """tandem: fault-tolerant multi-node PyTorch training.

{verbs}

`tandem VERB -h` shows a verb's common settings, `tandem VERB --help` shows all of them. `tandem help TOPIC`
describes one setting (help epochs), a group of settings (help settings) or the exit codes (help exit-codes).
Settings are flags (--epochs 3), variables (TANDEM_EPOCHS=3), lines of .env, or keys of a --config FILE.toml,
in this order of precedence.
Start here: tandem demo
"""


def main() -> None:
    """Run the console script; exit with the verb's exit code."""
    _open_closed_streams()
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    environ = dict(os.environ)  # a copy with the job's secret, which a launch removes from os.environ
    try:
        code = run(verb, sys.argv[2:], os.environ)
    except TandemError as error:
        from tandem.log import printable

        # A message may quote a file or a variable, with escape sequences for the terminal.
        print("\n".join(map(printable, f"tandem: {error}".split("\n"))), file=sys.stderr)
        code = error.exit_code
        # A node that fails before it joins would make the others wait until --master-timeout.
        if verb == "launch" and isinstance(error, ConfigError):
            from tandem.signals import exit_on_stop_signal

            with exit_on_stop_signal(code):
                from tandem.launch.announce_error import announce_error

                announce_error(sys.argv[2:], environ, error)
    except KeyboardInterrupt:
        # The code of a shell for a process that SIGINT ended.
        code = 130
    except BrokenPipeError:
        if "torch" in sys.modules:  # with torch loaded, it may be another pipe than stdout
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has read enough
        code = 141  # like a program that SIGPIPE ends
    except OSError as error:
        # A traceback of the user's own code says more than this line.
        if error.errno not in NO_SPACE or verb in TRAINING:
            raise
        code = _output_lost(error)
    try:
        sys.stdout.flush()
    except OSError as error:  # or the terminal was closed, which is no error
        if error.errno in NO_SPACE and code == FINISHED and verb not in TRAINING:
            code = _output_lost(error)
    with suppress(OSError):
        sys.stderr.flush()
    if "torch" in sys.modules:
        from tandem.json_output import drain

        drain()  # at a normal exit of the interpreter, atexit calls it
        os._exit(code)  # threads of gloo and of the store abort some interpreters at a normal exit
    sys.exit(code)


def _output_lost(error: OSError) -> int:
    """Say that the output is incomplete, discard what is left of it, and return the exit code."""
    print(f"tandem: the output is incomplete: {error.strerror}; free space and repeat", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _open_closed_streams() -> None:
    """Open the standard streams that the caller has closed (`2>&-`), so that writing to them does nothing.

    Otherwise the next file or socket would become stderr, and an error of the last flush would replace the
    exit code.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # the kernel gives the lowest free descriptor, which is this one
            mode = "r" if name == "stdin" else "w"
            os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            setattr(sys, name, open(descriptor, mode, closefd=False))


def run(verb: str, words: Sequence[str], environ: Environment) -> int:
    """Run the verb, and return its exit code. Raises TandemError with one line for the user."""
    if verb == "help" and words:
        print(_help_on(words[0]), end="")
        return FINISHED
    if verb in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n\n".join(map(_group, GROUPS.items()))), end="")
        return FINISHED
    if verb in ("-V", "--version", "version"):
        print(f"tandem {__version__}")
        return FINISHED
    if verb not in VERBS:
        near = nearest(verb, VERBS)
        hint = did_you_mean(near and f"`tandem {near}`", "; see `tandem --help`")
        raise ConfigError(f"unknown verb {verb!r}; expected one of {', '.join(VERBS)}{hint}")
    program = None
    if verb == "launch":  # the words after the program belong to it
        from tandem.launch.program_arguments import split
        from tandem.launch.torchrun_flags import translated

        words, program = split(translated(words, environ))
    elif verb == "verify-resume":
        from tandem.launch.program_arguments import split

        words, program = split(words, "tandem verify-resume")
    if "-h" in words or "--help" in words:
        print(parser_of(verb, is_short="--help" not in words).format_help(), end="")
        return FINISHED
    if verb == "health" and not words:  # probes call it every few seconds, so it builds no parser
        return host.health(None, environ)
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current directory was deleted; type `cd` and one that exists") from error
    options = parser_of(verb).read(words)
    options.program = program
    if name := getattr(options, "log_level", None):
        from tandem.log import LEVEL_VARIABLE

        os.environ[LEVEL_VARIABLE] = name  # for all processes of the run
    from tandem.process import allow_open_files

    allow_open_files()  # for all processes that the verb starts
    return VERBS[verb].run(options, environ)


def parser_of(verb: str, is_short: bool = False) -> "Parser":
    """Return the parser of a verb, which also formats its help; `is_short` is for `-h`."""
    from tandem.config import Parser

    found = VERBS[verb]
    parser = Parser(verb, found.usage, found.summary, found.takes_settings, is_short)
    if found.add_options is not None:
        found.add_options(parser)
    return parser


def _help_on(topic: str) -> str:
    if topic in VERBS:
        return parser_of(topic).format_help()
    from tandem.config.show import help_on

    return help_on(topic, list(VERBS))


def _group(group: tuple[str, Sequence[str]]) -> str:
    title, names = group
    return "\n".join([f"{title}:", *map(_line, names)])


def _line(verb: str) -> str:
    command = f"tandem {verb} {VERBS[verb].usage}"
    return f"  {command:<47} {VERBS[verb].summary}"


def completion(options: "Namespace", environ: Environment) -> int:
    """Print a script for shell completion of verbs, flags and values."""
    from tandem.config.completion import script

    parsers = {verb: parser_of(verb) for verb in VERBS}
    print(script(options.shell, parsers, {verb: each.summary for verb, each in VERBS.items()}), end="")
    return FINISHED


def _completion_options(parser: "Parser") -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="what the script is for")


VERBS: Mapping[str, Verb] = {
    **tasks.VERBS,
    **runs.VERBS,
    **live.VERBS,
    **host.VERBS,
    "completion": Verb(
        completion, "bash|zsh|fish", "print a completion script for your shell", _completion_options
    ),
}

GROUPS: Mapping[str, Sequence[str]] = {
    "Run": ("demo", "launch", "train", "cluster"),
    "Write": ("init", "check", "index"),
    "Inspect": ("runs", "page", "report", "checkpoints", "eval", "health", "doctor"),
    "Look inside": ("stacks", "profile", "memory"),
    "Use": ("export", "track"),
    "Deploy": ("k8s",),
    "Prove": ("verify-resume", "bench", "kill"),
    "Settings": ("config", "completion"),
}
"""The verbs by group, as `tandem --help` lists them."""
