"""Explain a script's usage error about a flag of tandem that was typed after the script.

torchrun has the same rule: what follows the script belongs to it. A script may have a flag of the same name,
so nothing is moved; only a script that rejects the flag gets the hint.
"""

import re
import shlex
from collections.abc import Iterator

from tandem.config.arguments import FLAGS
from tandem.config.removed import TORCHRUN
from tandem.launch.program_arguments import takes_next
from tandem.launch.torchrun_flags import SWITCHES
from tandem.script.job import Program

REJECTS = re.compile(r"unrecogni[sz]ed|no such option|unknown|unexpected", re.IGNORECASE)
"""How argparse, click and others begin to say that they do not know a flag."""


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
