"""The checkpoint volume from outside, even if no node exists any more.

A container of the image mounts it read-only and reads its files.
"""

import time
from collections.abc import Sequence

from tandem.cluster.engine import Cluster, ClusterError, docker, in_time
from tandem.cluster.project import DEFAULT_IMAGE

RELEASE_SECONDS = 20.0
POLL_SECONDS = 0.5
READ = 'stat -c %Y "$1" && cat "$1"'


def volume_of(project: str) -> str:
    return f"{project}_checkpoints"


def exists(volume: str) -> bool:
    """Return True if the volume exists. A container that mounts a missing volume would create it."""
    return docker("volume", "inspect", "--format", "{{.Name}}", volume, check=False).strip() == volume


def image_of(project: str) -> str:
    """Return the image of the project's containers, else the one that `make image` builds."""
    try:
        return Cluster.found(project).image
    except ClusterError:
        return DEFAULT_IMAGE


def reader(volume: str, image: str, script: str, *arguments: str) -> list[str]:
    """Return the command that runs a shell line with the volume, read-only, at /checkpoints.

    It may read all files, even those of other users, and write none.
    """
    allowed = ["--user", "0", "--cap-drop", "ALL", "--cap-add", "DAC_READ_SEARCH", "--read-only"]
    # tini forwards signals and reaps: a shell as process 1 would ignore SIGTERM.
    apart = ["--pull", "never", "--network", "none", "--no-healthcheck", "--entrypoint", "tini"]
    # nocopy: an empty volume must not be filled with the image's files.
    mount = ["-v", f"{volume}:/checkpoints:ro,nocopy"]
    shell = ["--", "sh", "-c", script, "sh", *arguments]
    return ["docker", "run", "--rm", *apart, *allowed, *mount, image, *shell]


def read(volume: str, image: str, path: str) -> tuple[str, float] | None:
    """Return a file of the volume and when it was written (Unix seconds); None if it does not exist."""
    if not exists(volume):
        return None
    ended = in_time(reader(volume, image, READ, path), text=True)
    written, _, text = ended.stdout.partition("\n")
    # The shell line also fails for a file that does not exist.
    return None if ended.returncode else (text, float(written))


def remove_volumes(volumes: Sequence[str]) -> None:
    """Remove volumes that `docker compose down` left because a container used them.

    An `up` in another terminal may just be reading one.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while left := [volume for volume in volumes if exists(volume)]:
        docker("volume", "rm", *left, check=False)
        if time.monotonic() > deadline:
            raise ClusterError(f"a container has volume {left[0]}: docker ps -a --filter volume={left[0]}")
        time.sleep(POLL_SECONDS)
