"""Collect facts about a run: settings, command, commit, versions, hardware, the end of its log.

Node 0's agent writes `RUN_DIR/about.json` when a launch begins; the page and the report read it.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from tandem import __version__, layout
from tandem.bounded_reader import RunFiles
from tandem.config.address import hidden, hide, is_secret
from tandem.config.settings import SETTINGS
from tandem.config.sources import PLACES
from tandem.rotation import tail
from tandem.script.job import FUNCTION
from tandem.telemetry.journal import write_json_atomic
from tandem.timeouts import GIT_SECONDS

PACKAGES = ("torch", "torchvision", "numpy")
LOG_LINES = 200
LOG_BYTES = 64 * 1024
LINE_CHARACTERS = 500


class About:
    """Facts about the run with files in `run_dir`; `secrets` are values that must not be shown."""

    def __init__(self, run_dir: Path, secrets: Iterable[str] = ()) -> None:
        self._run_dir = run_dir
        self._secrets = tuple(secrets)

    def write(self, gpus: Sequence[str]) -> None:
        """Record this launch: command, directory, commit, versions and hardware. A full disk is no error."""
        folder = Path.cwd()
        about = {
            "started": time.time(),
            "command": self.hide(_command()),
            "folder": str(folder),
            "commit": _commit(folder),
            "versions": {"tandem": __version__, "Python": platform.python_version(), **_versions()},
            "hardware": _hardware(gpus),
        }
        with suppress(OSError):
            write_json_atomic(self._run_dir / layout.ABOUT, about)

    def read(self, files: RunFiles | None = None) -> dict[str, Any]:
        """Return the record, and the settings as in `settings_of`; `files` is the reader to use."""
        files = RunFiles(self._run_dir) if files is None else files
        about = files.read(layout.ABOUT)
        config = files.read(layout.CONFIG)
        folder = PurePath(about.get("folder") or "")
        run_dir = {"run_dir": config["run_dir"]} if config.get("run_dir") else {}
        return {**self.hidden({**about, **run_dir}), "settings": settings_of(config, folder, self._secrets)}

    def log(self, reason: str = "") -> dict[str, object]:
        """Return {file, lines}: the end of the log of the rank named in `reason`, else of rank 0.

        The result has at most LOG_LINES lines.
        """
        named = re.search(r"\brank (\d{1,6})\b", reason)
        ranks = [named[1], "0"] if named else ["0"]
        for name in [*map(layout.rank_log, ranks), layout.node_log(0)]:
            with suppress(OSError):
                content, is_cut = tail(self._run_dir / layout.LOG / name, LOG_BYTES)
                # A truncated first line may begin inside a secret, which `hide` would not recognize.
                lines = self.hide(content.decode(errors="replace")).splitlines()[1 if is_cut else 0 :]
                return {"file": f"{layout.LOG}/{name}", "lines": [_cut(line) for line in lines[-LOG_LINES:]]}
        return {"file": None, "lines": []}

    def hide(self, text: str) -> str:
        return hide(text, self._secrets)

    def hidden(self, value: Any) -> Any:
        """Return `value` without secrets in any text in lists and dicts."""
        return hidden(value, self._secrets)


def settings_of(
    config: Mapping[str, Any], folder: PurePath, secrets: Sequence[str]
) -> list[dict[str, object]]:
    """Return {name, value, default, differs} for every setting in a config.json; a task's are `task.NAME`.

    `folder` is the directory in which the launch was started; default paths are relative to it.
    """
    rows = []
    for name, value in config.items():
        if name == "task_fields" and isinstance(value, dict):
            rows += [_row(f"task.{field}", text, None, secrets) for field, text in value.items()]
            continue
        default = SETTINGS[name].default if name in SETTINGS else None
        if isinstance(default, PurePath):
            default = str(default) if value == str(default) else str(folder / default)
        rows.append(_row(name, value, default, secrets))
    return rows


def _row(name: str, value: object, default: object, secrets: Sequence[str]) -> dict[str, object]:
    return {
        "name": hide(name, secrets),
        "value": hidden(value, secrets, is_secret(name), is_setting=True),
        "default": default,
        "differs": value != default and name not in PLACES,
    }


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"


def _command() -> str:
    """Return the command that the user typed; for a simulated node, its parent process's command."""
    words = list(sys.argv)
    if "--node-rank" in words:
        with suppress(OSError):
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")[:-1]
            at = next((i for i, word in enumerate(parent) if word == "launch" and _is_tandem(parent[:i])), 0)
            words = ["tandem", *parent[at:]] if at else words
    if FUNCTION in words:  # no one typed the flags; the settings are shown next to it
        return f"tandem.launch({PurePath(words[-1]).stem})"
    program = "tandem" if _is_tandem(words[:1]) else f"python {shlex.quote(words[0])}"
    return " ".join([program, *map(shlex.quote, words[1:])])


def _is_tandem(words: Sequence[str]) -> bool:
    """Return True if the last of these words starts tandem: its program, its package, or -m."""
    return bool(words) and (
        Path(words[-1]).name == "tandem" or Path(words[-1]).parts[-2:] == ("tandem", "__main__.py")
    )


def _commit(folder: Path) -> str | None:
    """Return the commit checked out in `folder`; None if git knows none.

    It does not check whether files differ from it, because git would then run commands from the directory's
    own .git/config.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def _versions() -> dict[str, str]:
    """Return the versions of installed packages without importing them."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _hardware(gpus: Sequence[str]) -> list[str]:
    """Return node 0's hardware in words: processor and usable cores, memory, GPUs, system."""
    # Do not use os.cpu_count(), because Slurm and taskset restrict a job to some of the cores.
    cores = len(os.sched_getaffinity(0))
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return [
        f"{_processor()}, {cores} cores",
        f"{gigabytes:.0f} GiB of memory",
        *counted,
        f"{platform.system()} on {platform.machine()}",
    ]


def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1].strip()
    return platform.machine()
