"""The checkpoint volume from outside, even if no node exists any more: read it, copy a run, remove it.

A container of the image mounts it read-only and reads its files. `make compose-get RUN=digits` copies a run
to a directory on this host.
"""

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.cluster.engine import Cluster, ClusterError, docker, in_time, project_word, say
from tandem.cluster.project import DEFAULT_IMAGE
from tandem.cluster.workload import RUN, check_run

RELEASE_SECONDS = 20.0
POLL_SECONDS = 0.5
READ = 'stat -c %Y "$1" && cat "$1"'
NO_SUCH_RUN = 44
CHANGED = 1
"""tar's exit code if a file changed or disappeared while it was read, because the run continues."""
NOT_STARTED = (125, 126, 127)
"""Docker's exit codes if the program was never started."""
TAKE = f'cd "/checkpoints/$1" 2>/dev/null || exit {NO_SUCH_RUN}; exec tar -cf - .'
LIST = 'cd /checkpoints && for each in *; do [ ! -d "$each" ] || echo "$each"; done'
MOST_NAMED = 20


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


def check_get(options: argparse.Namespace) -> None:
    """Check the run's name, and that the target directory is new or empty. Raises ClusterError.

    This needs no Docker engine. Without a name there is nothing to check: `get` then lists the runs.
    """
    run = options.run
    if not run:
        return
    check_run(run)
    folder = _folder_of(options)
    with _saying_what_to_type(folder, options):
        if folder.is_symlink() or folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ClusterError(
                f"{folder} already exists; choose a new directory: "
                f"make compose-get RUN={run} TO=runs/{run}-copy{project_word(options.project)}"
            )


def get(options: argparse.Namespace) -> int:
    """Copy a run completely or not at all, and overwrite nothing."""
    volume = volume_of(options.project)
    run = options.run
    named = project_word(options.project)
    # `docker run -v` would create a missing volume.
    if not exists(volume):
        raise ClusterError(
            f"there is no volume {volume} here, so no run of {options.project}; "
            f"start one: make compose-up NODES=2{named}"
        )
    image = options.image or image_of(options.project)
    if not docker("image", "inspect", "--format", "{{.Id}}", image, check=False).strip():
        raise ClusterError(
            f"there is no image {image} here, and one of tandem reads the volume; make it: make image, "
            "or name another: make compose-get IMAGE=NAME"
        )
    if not run:
        raise ClusterError(f"RUN is missing; {_known(volume, image)}{named}")
    folder = _folder_of(options)
    with _saying_what_to_type(folder, options):
        code = _bring(volume, image, run, folder)
    if code == NO_SUCH_RUN:
        raise ClusterError(f"RUN={run} is not in {volume}; {_known(volume, image)}{named}")
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    meanwhile = "; it changed meanwhile, so get it again when it has ended" if code == CHANGED else ""
    say(f"run {run} of {volume} is in {folder}: {len(files)} files, {megabytes:,.1f} MB{meanwhile}")
    return 0


def _folder_of(options: argparse.Namespace) -> Path:
    return Path(os.path.expanduser(options.to or f"runs/{options.run}"))


@contextlib.contextmanager
def _saying_what_to_type(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Convert an OSError in this block to a ClusterError that says which directory to use instead."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"cannot write {folder}: {error.strerror}; name another: "
            f"make compose-get RUN={options.run} TO=FOLDER{project_word(options.project)}"
        ) from error


def _bring(volume: str, image: str, run: str, folder: Path) -> int:
    """Return 0, CHANGED or NO_SUCH_RUN. Raises ClusterError and OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=".compose-get-", dir=folder.parent) as folder_beside:
        within = Path(folder_beside, "run")
        within.mkdir()
        code = _copy(reader(volume, image, TAKE, run), within, f"run {run}", volume)
        if code != NO_SUCH_RUN:
            within.rename(folder)
    return code


def _copy(source: Sequence[str], folder: Path, what: str, volume: str) -> int:
    """Unpack the archive that the command writes; return the command's exit code. Raises ClusterError."""
    # -o: files belong to this user, and not to the user ID of the containers.
    unpack = ["tar", "-x", "-o", "-f", "-", "-C", str(folder)]
    # A file, because a full pipe of errors would block the archive.
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(source, stdout=subprocess.PIPE, stderr=errors) as archive:
            unpacked = subprocess.run(unpack, stdin=archive.stdout, capture_output=True, text=True)
        errors.seek(0)
        last_line = (errors.read().strip().splitlines() or ["no output"])[-1]
    code = archive.returncode
    # tar fails here as well, because its input is empty.
    if code == NO_SUCH_RUN:
        return code
    # A program that never started leaves tar an empty input, and its own error is the cause.
    if unpacked.returncode and code not in NOT_STARTED:
        last_line = (unpacked.stderr.strip().splitlines() or ["no output"])[0]
        raise ClusterError(f"{what} cannot be written into {folder.parents[1]}: {last_line}")
    if code not in (0, CHANGED):
        raise ClusterError(f"{what} cannot be read from {volume}: {last_line}")
    return code


def _known(volume: str, image: str) -> str:
    """List the existing runs and what to type, for a message."""
    ended = in_time(reader(volume, image, LIST), text=True)
    names = [name for name in ended.stdout.splitlines() if RUN.fullmatch(name)]
    if not names:
        return "there is none; start one: make compose-up NODES=2"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"there are: {', '.join(names[:MOST_NAMED])}{more}; type: make compose-get RUN={names[0]}"
