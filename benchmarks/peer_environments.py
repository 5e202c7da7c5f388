"""Create a virtual environment for each peer, below build/peers, from PyPI.

It can import the packages of this interpreter, such as torch, unless the peer needs another torch. An
environment is created once for its list of packages, and again when that list changes.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INSTALL_SECONDS = 1800.0


class NotInstalled(Exception):
    """A peer that cannot be installed; the message is the installer's last error line."""


class Environment(NamedTuple):
    """`installs`: the arguments of each call of pip; {site} is its directory of packages. `own_torch`: the
    packages of this interpreter stay out."""

    installs: Sequence[str] = ()
    own_torch: bool = False


def prepare(name: str, environment: Environment, folder: Path) -> str:
    """Return the interpreter of an environment, which is made if it is not there. Raises NotInstalled."""
    if not environment.installs:
        return sys.executable
    home, wanted = folder / name, json.dumps(environment)
    stamp, python = home / "installed.json", home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    shutil.rmtree(home, ignore_errors=True)
    _call(name, [sys.executable, "-m", "venv", str(home)])
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    if not environment.own_torch:
        beside = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site / "beside.pth").write_text(beside)
    for words in environment.installs:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        _call(name, [*pip, *(word.format(site=site) for word in words.split())])
    stamp.write_text(wanted)
    return str(python)


def _call(name: str, command: Sequence[str]) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    print(f"{name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed in {INSTALL_SECONDS:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled((lines or done.stderr.splitlines() or ["no output"])[-1][-300:])


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return {package: version} as this interpreter sees them."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code, *packages], env=kept, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(done.stderr.strip().splitlines()[-1])
    return dict(zip(packages, done.stdout.split(), strict=True))
