"""Which image a cluster has: tandem's own from the checkout, or that of the project in the current folder."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem import shipped
from tandem.tasks.init import name_of

DEFAULT_IMAGE = "tandem:cuda"
OVERRIDE = "OVERRIDE_FILE"
"""Among a cluster's variables: the project's compose.override.yaml."""
OVERRIDE_NAME = "compose.override.yaml"


def project_folder() -> Path | None:
    """Return the current folder if it is a project as `tandem init` writes one.

    Beside a checkout, a Dockerfile alone is not enough: the folder may be about something else.
    """
    here, checkout = Path.cwd(), shipped.checkout()
    if here == checkout or not (here / "Dockerfile").is_file():
        return None
    return here if checkout is None or (here / OVERRIDE_NAME).is_file() else None


def image_of(options: argparse.Namespace) -> str:
    """Return the image that was asked for, else the project's, else tandem's."""
    folder = project_folder()
    return options.image or (name_of(folder) if folder else DEFAULT_IMAGE)


def own_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what a project's own task adds: its override file, and a run with the project's name."""
    folder = project_folder()
    if folder is None or options.image or options.task or options.script:
        return {}
    if not (folder / OVERRIDE_NAME).is_file():
        return {}
    run = {} if options.run else {"RUN": name_of(folder)}
    return {**run, OVERRIDE: str(folder / OVERRIDE_NAME)}


def build_command(image: str) -> Sequence[str] | None:
    """Return the command that builds the image; None where there is nothing to build it from."""
    if folder := project_folder():
        return ["docker", "build", "--quiet", "--tag", image, str(folder)]
    if checkout := shipped.checkout():
        return ["make", "--silent", "-C", str(checkout), "image"]
    return None


def build(command: Sequence[str]) -> bool:
    """Run it, and show the last lines of its errors if it fails."""
    built = subprocess.run(command, capture_output=True, text=True, env=_without_make())
    if built.returncode:
        lines = built.stderr.strip().splitlines() or ["no output"]
        print("\n".join(lines[-20:]), file=sys.stderr)
    return built.returncode == 0


def _without_make() -> dict[str, str]:
    """This environment without what an outer make adds: its flags and overrides are not for `make image`."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    return {**own, "DOCKER_BUILDKIT": "1"}
