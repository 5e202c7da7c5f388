"""What a verb is."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser

Environment = Mapping[str, str]


class Verb(NamedTuple):
    """What a verb runs, its line in the help, and what it takes besides settings."""

    run: "Callable[[Namespace, Environment], int]"
    usage: str
    summary: str
    add_options: "Callable[[Parser], None] | None" = None
    takes_settings: bool = True
