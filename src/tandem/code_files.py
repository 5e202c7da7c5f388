"""Find the files of the user's own code among the imported modules, and notice when they change."""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tandem.text import relative_path

INSTALLED = (
    "/site-packages/",
    "/dist-packages/",
    sysconfig.get_path("stdlib") + "/",
    sysconfig.get_path("scripts") + "/",
)
"""Parts of the paths of code that is installed."""
OURS = str(Path(__file__).resolve().parent) + "/"
MOST_FILES = 200
MOST_NAMED = 3
MOST_BYTES = 10_000_000
"""Largest file whose content is compared between nodes; larger ones are native libraries."""


class CodeFile(NamedTuple):
    """A file that a process has imported, as it was then. The size is in bytes."""

    path: str
    changed_ns: int
    size: int
    digest: str
    """The digest of its content; "" if that could not be read, or is too large."""

    @classmethod
    def of(cls, path: str) -> "CodeFile":
        """Return the file as it is now; a file that is gone has the size -1."""
        try:
            found = os.stat(path)
            content = Path(path).read_bytes() if found.st_size <= MOST_BYTES else None
        except OSError:
            return cls(path, 0, -1, "")
        digest = "" if content is None else hashlib.sha256(content).hexdigest()[:16]
        return cls(path, found.st_mtime_ns, found.st_size, digest)

    def now(self) -> "CodeFile":
        """Return the same file as it is now; its content is read only if its time or size has changed."""
        with suppress(OSError):
            found = os.stat(self.path)
            if (found.st_mtime_ns, found.st_size) == (self.changed_ns, self.size):
                return self
        return CodeFile.of(self.path)


def is_own(path: str) -> bool:
    """Return whether a module's file is the user's own code: neither installed nor tandem's."""
    return not path.startswith((OURS, "<")) and not any(folder in path for folder in INSTALLED)


def imported_code() -> dict[str, CodeFile]:
    """Return the user's own modules that this process has imported, by name, at most MOST_FILES."""
    files = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    own = [(name, file) for name, file in files if isinstance(file, str) and is_own(file)]
    return {name: CodeFile.of(os.path.abspath(file)) for name, file in own[:MOST_FILES]}


def write_code(path: Path, installed: Iterable[str] = ()) -> None:
    """Record at `path` the code that this process has imported, and the names of `installed` modules.

    Nothing is raised if the file cannot be written.
    """
    record = {"installed": list(installed), "own": imported_code()}
    with suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(record))
        path.with_suffix(".new").replace(path)


def read_code(path: Path) -> dict[str, CodeFile]:
    """Return the code in a file that `write_code` has written; empty if there is none."""
    try:
        return {name: CodeFile(*each) for name, each in json.loads(path.read_text())["own"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def read_installed(path: Path) -> list[str]:
    """Return the names of installed modules in such a file. Raises OSError and ValueError."""
    return [str(name) for name in json.loads(path.read_text())["installed"]]


def digests(code: Mapping[str, CodeFile]) -> dict[str, str]:
    """Return {module: digest}, to send to other nodes."""
    return {name: each.digest for name, each in code.items()}


def difference(code: Mapping[str, CodeFile], theirs: Mapping[str, object]) -> str:
    """Return a warning about modules whose digests differ from the first node's; "" if none does."""
    own = [(name, each) for name, each in code.items() if each.digest and theirs.get(name)]
    different = [each.path for name, each in own if each.digest != theirs[name]]
    if not different:
        return ""
    return (
        f"{named(different, 'differs', 'differ')} from the first node's copy: ranks that run different code "
        "can train wrong weights without an error; use the same files on all nodes"
    )


def named(paths: Sequence[str], one: str, several: str) -> str:
    """Return "a.py, b.py have" for up to MOST_NAMED files, then their number."""
    names = [str(relative_path(Path(path))) for path in sorted(paths)]
    more = len(names) - MOST_NAMED
    text = ", ".join(names[:MOST_NAMED]) + (f" and {more} more files" if more > 0 else "")
    return f"{text} {one if len(names) == 1 else several}"
