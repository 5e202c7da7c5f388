"""What is known of a run beside its numbers: settings, command, commit, versions, hardware, its log's end.

Node 0's agent writes `RUN_DIR/about.json` when a launch begins; page and report read it there.
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
from tandem.config.secrets import hidden, hide, is_secret
from tandem.config.settings import SETTINGS
from tandem.config.sources import PLACES
from tandem.reading import RunFiles
from tandem.rotation import tail
from tandem.telemetry.journal import write_json_atomic
from tandem.timeouts import GIT_SECONDS

PACKAGES = ("torch", "torchvision", "numpy")
LOG_LINES, LOG_BYTES, LINE_CHARACTERS = 200, 64 * 1024, 500


class About:
    """What is known of the run whose files lie in `run_dir`; `secrets` are values that nobody is shown."""

    def __init__(self, run_dir: Path, secrets: Iterable[str] = ()) -> None:
        self._run_dir, self._secrets = run_dir, tuple(secrets)

    def write(self, gpus: Sequence[str]) -> None:
        """Write down this launch: what was typed, where, which code, on what; a full disk is no error."""
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
        """What was written down, and the settings as `settings_of` has them; `files`: who reads them."""
        files = RunFiles(self._run_dir) if files is None else files
        about, config = files.read(layout.ABOUT), files.read(layout.CONFIG)
        folder = PurePath(about.get("folder") or "")
        place = {"run_dir": config["run_dir"]} if config.get("run_dir") else {}
        return {**self.hidden({**about, **place}), "settings": settings_of(config, folder, self._secrets)}

    def log(self, reason: str = "") -> dict[str, object]:
        """{file, lines}: the end of the log of the rank that `reason` names, else of rank 0; bounded."""
        named = re.search(r"\brank (\d{1,6})\b", reason)
        ranks = [named[1], "0"] if named else ["0"]
        for name in [*map(layout.rank_log, ranks), layout.node_log(0)]:
            with suppress(OSError):
                content, is_cut = tail(self._run_dir / layout.LOG / name, LOG_BYTES)
                lines = self.hide(content.decode(errors="replace")).splitlines()[1 if is_cut else 0 :]
                return {"file": f"{layout.LOG}/{name}", "lines": [_cut(line) for line in lines[-LOG_LINES:]]}
        return {"file": None, "lines": []}

    def hide(self, text: str) -> str:
        """`text` without secrets."""
        return hide(text, self._secrets)

    def hidden(self, value: Any) -> Any:
        """The same of all text in lists and dicts."""
        return hidden(value, self._secrets)


def settings_of(
    config: Mapping[str, Any], folder: PurePath, secrets: Sequence[str]
) -> list[dict[str, object]]:
    """{name, value, default, differs} of every setting in a config.json, the task's own as `task.NAME`.

    `folder`: where the launch was typed; defaults that are paths are below it.
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
    """What a person typed: of a simulated node, that is its parent's."""
    words = list(sys.argv)
    if "--node-rank" in words:
        with suppress(OSError):
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")[:-1]
            at = next((i for i, word in enumerate(parent) if word == "launch" and _is_tandem(parent[:i])), 0)
            words = ["tandem", *parent[at:]] if at else words
    program = "tandem" if _is_tandem(words[:1]) else f"python {shlex.quote(words[0])}"
    return " ".join([program, *map(shlex.quote, words[1:])])


def _is_tandem(words: Sequence[str]) -> bool:
    """Whether these words, the last of all, start tandem: its program, its package, or -m."""
    return bool(words) and (
        Path(words[-1]).name == "tandem" or Path(words[-1]).parts[-2:] == ("tandem", "__main__.py")
    )


def _commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder`; None where git has none.

    Whether files differ from it is not asked: to tell, git would run what a folder's own .git/config names.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def _versions() -> dict[str, str]:
    """Of packages that are installed, without importing one."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _hardware(gpus: Sequence[str]) -> list[str]:
    """Node 0's, in words: system, processor with the cores this process may use, memory, GPUs."""
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
