"""The verbs that look inside the ranks of a running run. They import what they need when they are called."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import FAILED, FINISHED
from tandem.verbs.verb import JSON, Environment, Verb, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser


def _ask(options: "Namespace", action: str, asked: Mapping[str, float]) -> dict[str, Any]:
    from tandem.launch.inspection_socket import ask
    from tandem.run.directory import RunDir

    return ask(RunDir(options.run_dir), action, asked)


def _print(result: Mapping[str, Any], as_json: bool, text: Callable[[Mapping[str, Any]], str]) -> int:
    """Print a result; return 1 if a rank gave no answer."""
    from tandem.log import printable

    if as_json:
        print_json(result)
    else:
        # A script may name its functions and threads as it likes.
        print("\n".join(map(printable, text(result).split("\n"))))
    return FAILED if any(row.get("error") for row in result["answers"]) else FINISHED


def stacks(options: "Namespace", environ: Environment) -> int:
    """Print where every rank is; return 1 if one gave no stack."""
    from tandem.report.inspection import stacks_text

    result = _ask(options, "stacks", {"native": 1} if options.native else {})
    return _print(result, options.json, lambda found: stacks_text(found, options.all_threads))


def stacks_options(parser: "Parser") -> None:
    _run_argument(parser)
    parser.option("--all-threads", bool, "show all threads of each rank, not only the main thread")
    text = "add native frames by py-spy, if it is installed; it stops each rank for about a second"
    parser.option("--native", bool, text)
    parser.option("--json", bool, JSON)


def profile(options: "Namespace", environ: Environment) -> int:
    """Record the next steps of all ranks, and print where the trace is; return 1 if a rank gave none."""
    from tandem.report.inspection import profile_text

    result = _ask(options, "profile", {"steps": options.steps})
    return _print(result, options.json, profile_text)


def profile_options(parser: "Parser") -> None:
    from tandem.config import Count

    _run_argument(parser)
    parser.option("--steps", Count, "number of steps to record", 5)
    parser.option("--json", bool, JSON)


def memory(options: "Namespace", environ: Environment) -> int:
    """Print what uses the memory of every rank; return 1 if a rank did not answer."""
    from tandem.report.inspection import memory_text

    result = _ask(options, "memory", {"seconds": options.seconds})
    return _print(result, options.json, memory_text)


def memory_options(parser: "Parser") -> None:
    from tandem.config import Count

    _run_argument(parser)
    parser.option("--seconds", Count, "how long to watch allocations; this slows Python on CPU ranks", 3)
    parser.option("--json", bool, JSON)


def _run_argument(parser: "Parser") -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of a running run")


VERBS: Mapping[str, Verb] = {
    "stacks": Verb(
        stacks,
        "RUN_DIR [--all-threads] [--native] [--json]",
        "show where every rank of a running run is: file and line",
        stacks_options,
    ),
    "profile": Verb(
        profile,
        "RUN_DIR [--steps N] [--json]",
        "record the next steps of all ranks of a running run in one trace",
        profile_options,
    ),
    "memory": Verb(
        memory,
        "RUN_DIR [--seconds N] [--json]",
        "show what the memory of every rank of a running run holds",
        memory_options,
    ),
}
