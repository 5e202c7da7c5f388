"""Explain flags that were typed on the wrong side of a script.

Words after a script belong to it, as under torchrun. A script may have a flag of the same name, so nothing is
moved. A script that rejects a flag of tandem gets a hint. Flags before a plain script get a warning if they
only concern tasks and custom loops.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from tandem.config import SETTINGS, Given
from tandem.config.arguments import FLAGS
from tandem.config.removed import TORCHRUN
from tandem.launch.program_arguments import takes_next
from tandem.launch.torchrun_flags import SWITCHES
from tandem.script.job import Program

REJECTS = re.compile(r"unrecogni[sz]ed|no such option|unknown|unexpected", re.IGNORECASE)
"""Words with which argparse, click and others reject an unknown flag."""

TRAINING_SLICES = ("data", "optimization", "exchange", "evaluation", "checkpoint")
TRAINING_SETTINGS = ("epochs", "steps", "seed", "strategy", "sync_batchnorm", "precision", "compile")
"""Settings that tasks and custom loops read; a script without tandem does not."""
MOST_FILES = 200
"""Limit for the files next to a script that are searched for tandem."""


def without_effect(program: Program, flags: Mapping[str, Given]) -> str:
    """Return a warning about `flags` that a plain script does not read; else "".

    A script is plain if neither it nor a file next to it names tandem.
    """
    unread = [SETTINGS[key] for key in flags if key in SETTINGS and _is_for_training(key)]
    if program.kind != "script" or not unread or _names_tandem(Path(program.target)):
        return ""
    typed = shlex.join([word for each in unread for word in (each.flag, flags[each.name].text)])
    return (
        f"{program} does not use tandem, so these have no effect: {typed}; "
        f"a script's own arguments follow it: tandem launch {program} {typed}"
    )


def _is_for_training(key: str) -> bool:
    return key in TRAINING_SETTINGS or SETTINGS[key].slice in TRAINING_SLICES


def _names_tandem(script: Path) -> bool:
    try:
        return any(b"tandem" in each.read_bytes() for each in islice(script.parent.glob("*.py"), MOST_FILES))
    except OSError:
        return True


def hint(program: Program, last_line: str) -> str:
    """Return what to type instead if `last_line`, a script's last line, rejects flags of tandem; else ""."""
    if program.kind == "command" or REJECTS.search(last_line) is None:
        return ""
    rejected = {word.partition("=")[0] for word in re.findall(r"--[\w.=-]+", last_line)}
    words = [word for word in _of_tandem(program) if word[0].partition("=")[0] in rejected]
    if not words:
        return ""
    names = [word[0].partition("=")[0] for word in words]
    verb, it = ("follows", "it") if len(names) == 1 else ("follow", "them")
    typed = shlex.join([part for word in words for part in word])
    return (
        f"{', '.join(names)} {verb} the script, so the script gets {it}; "
        f"to give {it} to tandem: tandem launch {typed} {program}"
    )


def _of_tandem(program: Program) -> Iterator[list[str]]:
    """Yield the flags of tandem among the program's arguments, each with its value."""
    words = program.arguments
    for index, word in enumerate(words):
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS or name in TORCHRUN:
            yield [word, *words[index + 1 : index + 1 + takes_next(word, words[index + 1 : index + 2])]]
        elif name in SWITCHES:
            yield [word]
