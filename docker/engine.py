#!/usr/bin/env python3
"""Say in one line which container engine is missing, with code 2, before a recipe of make calls it.

    docker/engine.py              an engine that answers
    docker/engine.py compose      and a Compose that is new enough
    docker/engine.py image NAME   and this image
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

from tandem.cluster.engine import ClusterError, check_compose, check_engine, docker  # noqa: E402


def check_image(name: str) -> None:
    """Check that the engine has the image. Raises ClusterError."""
    if not docker("image", "inspect", "--format", "{{.Id}}", name, check=False).strip():
        raise ClusterError(f"there is no image {name}; build it: make image")


if __name__ == "__main__":
    try:
        check_engine()
        if sys.argv[1:2] == ["compose"]:
            check_compose()
        if sys.argv[1:2] == ["image"]:
            check_image(sys.argv[2])
    except ClusterError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
