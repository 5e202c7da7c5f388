"""Define what a verb is."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser

Environment = Mapping[str, str]
JSON = "print one line of JSON instead (docs/json.md)"


def print_json(found: object) -> None:
    """Print strict JSON on one line of standard output. Progress belongs on standard error."""
    # json.dumps would write NaN, which is not JSON.
    from tandem.telemetry.journal import to_json

    print(to_json(found), flush=True)


def verbosity_options(parser: "Parser") -> None:
    """Add -v and -q, which apply to all processes of the run."""
    parser.add_argument(
        "-v", "--verbose", dest="log_level", action="store_const", const="debug", help="log more detail"
    )
    parser.add_argument(
        "-q",
        "--quiet",
        dest="log_level",
        action="store_const",
        const="warning",
        help="log only warnings and errors; files in RUN_DIR/log stay complete",
    )


class Verb(NamedTuple):
    """A verb: the function to run, its line in the help, and what it accepts besides settings."""

    run: "Callable[[Namespace, Environment], int]"
    usage: str
    summary: str
    add_options: "Callable[[Parser], None] | None" = None

    @property
    def takes_settings(self) -> bool:
        """Whether it takes the settings of a run as flags."""
        return "[settings]" in self.usage
