"""A mistake that ends a node before it knows its place: the others, who would wait for it, hear why.

The place is read from the settings that say it, whatever else is wrong. Where these are wrong as well, nobody
is told, and the others say whom they wait for.
"""

import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config import SETTINGS, Given, resolve
from tandem.errors import ConfigError
from tandem.launch.program import split
from tandem.launch.secret import take_key
from tandem.launch.torchrun_flags import translated
from tandem.platforms.placement import Placement, detect, of_this_process
from tandem.signals import StopFlag
from tandem.timeouts import ANNOUNCE_SECONDS

PLACE = ("nodes", "node_rank", "elastic", "master")
"""The settings that say where a node stands."""


def tell_others(words: Sequence[str], environ: Mapping[str, str], mistake: ConfigError) -> None:
    """Have the nodes end that wait for this one; `words` are those after `tandem launch`.

    Those that come within half a minute: nobody knows whether there are any.
    """
    with suppress(ConfigError, OSError):
        placement, key = place_of(words, environ), take_key(dict(environ))
        if placement is None or (placement.elastic and placement.node_rank):
            return  # elastic nodes do without it
        limit = f"for up to {ANNOUNCE_SECONDS:.0f} s; press Ctrl-C to exit now"
        print(f"tandem: telling the other nodes why this one exits, {limit}", file=sys.stderr, flush=True)
        from tandem.launch.meeting_place import MeetingPlace, announce

        announce(MeetingPlace(placement, key), mistake.exit_code, str(mistake), StopFlag())


def place_of(words: Sequence[str], environ: Mapping[str, str]) -> Placement | None:
    """This node among several that have an agent each; None for any other, and where it is not known."""
    with suppress(ConfigError):
        words = translated(words, environ)
    flags = _flags(words)
    variables = {SETTINGS[name].variable: environ.get(SETTINGS[name].variable, "") for name in PLACE}
    files = {"TANDEM_CONFIG": environ.get("TANDEM_CONFIG", "")}
    without = {name: given for name, given in flags.items() if name != "config"}
    for tried in ((flags, variables | files, Path(".env")), (without, variables, None)):
        with suppress(ConfigError):
            asked = resolve(*tried).settings.launch
            placement = detect(of_this_process(environ), socket.gethostname(), asked)
            has_agents = placement.rank is None and not placement.starts_all
            return placement if has_agents and placement.nodes > 1 else None
    return None


def _flags(words: Sequence[str]) -> dict[str, Given]:
    """What the words say of the place, beside whatever else they say."""
    named = {SETTINGS[name].flag: name for name in PLACE} | {"--config": "config"}
    with suppress(ConfigError):
        words, _ = split(words)
    given = dict[str, Given]()
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, is_joined, text = word.partition("=")
        if flag in named:
            given[named[flag]] = Given(text if is_joined else following, f"flag {flag}", flag)
    return given
