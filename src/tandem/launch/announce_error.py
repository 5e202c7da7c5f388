"""Announce a configuration error to the other nodes before this node knows its own position.

The position is read from the settings in `PLACE` alone, whatever else is invalid. If these are invalid too,
nothing is announced, and the other nodes report which node is missing.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config import SETTINGS, Given, resolve
from tandem.errors import ConfigError
from tandem.launch.program_arguments import split
from tandem.launch.secret import take_key
from tandem.launch.torchrun_flags import translated
from tandem.platforms.detection import Placement, detect_here
from tandem.signals import StopFlag
from tandem.timeouts import ANNOUNCE_SECONDS

PLACE = ("nodes", "node_rank", "elastic", "master")
"""The settings that determine a node's position in the job."""


def announce_error(words: Sequence[str], environ: Mapping[str, str], mistake: ConfigError) -> None:
    """End the nodes that wait for this one, with the reason; `words` are those after `tandem launch`.

    Reaches the nodes that arrive within ANNOUNCE_SECONDS, if there are any.
    """
    with suppress(ConfigError, OSError):
        placement = placement_of(words, environ)
        key = take_key(dict(environ))
        if placement is None or (placement.elastic and placement.node_rank):
            return  # an elastic job can start without this node
        limit = f"for up to {ANNOUNCE_SECONDS:.0f} s; press Ctrl-C to exit now"
        print(f"tandem: telling the other nodes why this one exits, {limit}", file=sys.stderr, flush=True)
        from tandem.launch.store_endpoint import StoreEndpoint, announce

        announce(StoreEndpoint(placement, key), mistake.exit_code, str(mistake), StopFlag())


def placement_of(words: Sequence[str], environ: Mapping[str, str]) -> Placement | None:
    """Return this node's placement if it is one of several nodes with an agent each, else None.

    Also returns None if the position is unknown.
    """
    with suppress(ConfigError):
        # The invalid flag may be one of torchrun's; tandem's own flags can be read without the translation.
        words = translated(words, environ)
    flags = _flags(words)
    variables = {SETTINGS[name].variable: environ.get(SETTINGS[name].variable, "") for name in PLACE}
    files = {"TANDEM_CONFIG": environ.get("TANDEM_CONFIG", "")}
    without = {name: given for name, given in flags.items() if name != "config"}
    # The second attempt leaves out the files, because an unreadable one may be the error to announce.
    for tried in ((flags, variables | files, Path(".env")), (without, variables, None)):
        with suppress(ConfigError):
            asked = resolve(*tried).settings.launch
            placement = detect_here(environ, asked)
            has_agents = placement.rank is None and not placement.starts_all
            return placement if has_agents and placement.nodes > 1 else None
    return None


def _flags(words: Sequence[str]) -> dict[str, Given]:
    """Return the flags in `words` that determine the position, and skip all others, valid or not."""
    named = {SETTINGS[name].flag: name for name in PLACE} | {"--config": "config"}
    with suppress(ConfigError):
        words, _ = split(words)
    given = dict[str, Given]()
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, is_joined, text = word.partition("=")
        if flag in named:
            given[named[flag]] = Given(text if is_joined else following, f"flag {flag}", flag)
    return given


# Write a container's termination message, which `kubectl describe pod` and the job's events show.

TERMINATION_LOG = Path("/dev/termination-log")
LARGEST_BYTES = 4096  # Kubernetes reads no more


def write_termination_message(reason: str) -> None:
    """Write the reason to the file, if the kubelet has mounted it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.write(descriptor, reason.encode(errors="replace")[:LARGEST_BYTES])
        finally:
            os.close(descriptor)
