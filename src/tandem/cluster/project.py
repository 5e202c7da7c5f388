"""The image of a cluster: tandem's own from the checkout, or that of the project in the current directory."""

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
"""A cluster variable with the path of the project's compose.override.yaml."""
OVERRIDE_NAME = "compose.override.yaml"


def project_folder() -> Path | None:
    """Return the current directory if it is a project created by `tandem init`.

    In addition to a checkout, a Dockerfile alone is not enough: the directory may be unrelated.
    """
    here = Path.cwd()
    checkout = shipped.checkout()
    if here == checkout or not (here / "Dockerfile").is_file():
        return None
    return here if checkout is None or (here / OVERRIDE_NAME).is_file() else None


def image_of(options: argparse.Namespace) -> str:
    """Return the requested image, else the project's, else tandem's."""
    folder = project_folder()
    return options.image or (name_of(folder) if folder else DEFAULT_IMAGE)


def own_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables for a project's own task: its override file, and a run named after it."""
    folder = project_folder()
    if folder is None or options.image or options.task or options.script:
        return {}
    if not (folder / OVERRIDE_NAME).is_file():
        return {}
    run = {} if options.run else {"RUN": name_of(folder)}
    return {**run, OVERRIDE: str(folder / OVERRIDE_NAME)}


def build_command(image: str) -> Sequence[str] | None:
    """Return the command that builds the image; None if there is nothing to build it from."""
    if folder := project_folder():
        return ["docker", "build", "--quiet", "--tag", image, str(folder)]
    if checkout := shipped.checkout():
        return ["make", "--silent", "-C", str(checkout), "image"]
    return None


def build(command: Sequence[str]) -> bool:
    """Run the command; if it fails, print the last lines of its errors."""
    built = subprocess.run(command, capture_output=True, text=True, env=_without_make())
    if built.returncode:
        lines = built.stderr.strip().splitlines() or ["no output"]
        print("\n".join(lines[-20:]), file=sys.stderr)
    return built.returncode == 0


def _without_make() -> dict[str, str]:
    """Return this environment without variables of an outer make, whose flags must not reach `make image`."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    # The Dockerfile mounts caches and secrets, which needs BuildKit. Older engines use it only if asked to.
    return {**own, "DOCKER_BUILDKIT": "1"}
