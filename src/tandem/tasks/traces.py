"""Find where in a task's own code an error came from, and shorten its traceback.

A wrong shape or dtype is raised in torch, dozens of frames below the task's own line.
"""

import linecache
import re
import traceback
from pathlib import Path

from tandem.code_files import INSTALLED, OURS
from tandem.errors import text_of
from tandem.text import SAMPLE_NOTE, notes_of

TASKS = str(Path(__file__).resolve().parent) + "/"
# An exception group has bars before its lines. Names such as `<string>` are no files.
FRAME = re.compile(r'^ +\|? *File "([^"<][^"]*)", line (\d+), in (.+)$', re.M)
MOST_FRAMES = 4
MOST_LINES = 10
LINE_CHARACTERS = 500
LOADER = re.compile(r"Caught \w+ in .+\.\nOriginal Traceback")


def full_trace(error: BaseException) -> str:
    """Return the whole traceback, as Python shows it."""
    return "".join(traceback.format_exception(error)).rstrip()


def short_trace(error: BaseException, owner: str = "the task") -> str:
    """Return the frames of the task's code, else tandem's, else the last ones; at most MOST_LINES lines."""
    frames, is_own = _frames(error)
    whose = f", in {owner}'s code" if is_own else ""
    lines = [f"Traceback (most recent call last{whose}):"]
    for file, line, name in frames[-MOST_FRAMES:]:
        lines.append(f'  File "{file}", line {line}, in {name}')
        if code := linecache.getline(file, int(line)).strip():
            lines.append(f"    {code[:LINE_CHARACTERS]}")
    return "\n".join(lines[:MOST_LINES])


def script_trace(error: BaseException) -> str:
    """Return `short_trace` of a script and the last line of Python's own traceback, for a terminal."""
    lines = traceback.format_exception_only(error)
    # Notes follow that line, one entry for each of their lines.
    notes = [str(note) for note in getattr(error, "__notes__", None) or ()]
    last = lines[-1 - sum(len(note.split("\n")) for note in notes)].rstrip()
    return "\n".join([short_trace(error, "the script"), last, *notes_of(error)])


def what_and_where(error: BaseException) -> str:
    """Return one line such as `RuntimeError: shapes do not fit in sample 7 (my_task.py line 12)`."""
    kind = type(error).__name__
    text = text_of(error).strip()
    notes = notes_of(error)
    if LOADER.match(text):  # from a loader process: the error is the last line of its traceback, before notes
        *lines, last = text.splitlines()
        if last.startswith(SAMPLE_NOTE):
            notes, last = [last], lines[-1]
        kind, _, text = last.partition(": ")
    what = " ".join([f"{kind}: {text.splitlines()[0]}" if text else kind, *notes])
    frames, _ = _frames(error)
    return f"{what} ({_shown(frames[-1][0])} line {frames[-1][1]})" if frames else what


def _frames(error: BaseException) -> tuple[list[tuple[str, str, str]], bool]:
    """Return (file, line, function) of the frames in a task's code, and whether there are any.

    Otherwise return tandem's frames, which called the failing code (the autograd engine shows no more), or
    all frames. They are parsed from text, because a loader process sends its traceback as text.
    """
    found = FRAME.findall(full_trace(error))
    outside = [each for each in found if not any(part in each[0] for part in INSTALLED)]
    own = [each for each in outside if not each[0].startswith(OURS)]
    # A built-in task counts as the failing task only if no other code does.
    own = own or [each for each in found if each[0].startswith(TASKS)]
    ours = [each for each in found if each[0].startswith(OURS)]
    return own or ours or found, bool(own)


def _shown(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
