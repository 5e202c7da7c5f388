"""Checks before a cluster starts: names, numbers, the port, free space, the volumes' owner."""

import json
import re
import socket

from tandem.cluster.engine import Cluster, ClusterError, docker

BUILD_NEEDS_BYTES = 20 * 10**9
RUN_NEEDS_BYTES = 10**9
NODES_LIMIT = 64
VOLUMES = ("checkpoints", "data")

LOOK_AT_VOLUMES = """
import json, os, shutil, sys
folders = ("/checkpoints", "/data")
if sys.argv[1:] and os.access("/checkpoints", os.W_OK) and not os.path.exists(sys.argv[1]):
    os.mkdir(sys.argv[1], 0o700)  # the engine would make it as root
print(json.dumps({
    "free": shutil.disk_usage("/checkpoints").free,
    "foreign": [[f, os.stat(f).st_uid] for f in folders if not os.access(f, os.W_OK)],
}))
"""


PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


def check_project(text: str) -> None:
    """Raise ClusterError unless Compose accepts `text` as a project name."""
    if not PROJECT.fullmatch(text):
        raise ClusterError(
            f"PROJECT: invalid value {text!r}; expected lowercase letters, digits, dashes and underscores"
        )


def check_image(text: str) -> None:
    """Raise ClusterError unless `text` is empty or a valid image name."""
    if text and not IMAGE.fullmatch(text):
        raise ClusterError(f"IMAGE: invalid value {text!r}; expected a name such as IMAGE=tandem:cuda")


def check_switch(name: str, text: str) -> None:
    """Raise ClusterError unless `text` is empty, 0 or 1."""
    if text not in ("", "0", "1"):
        raise ClusterError(f"{name}: invalid value {text!r}; expected 1, or leave it out")


def checked_epochs(text: str) -> int:
    """Return the number of epochs. Raises ClusterError."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ClusterError(f"EPOCHS: invalid value {text!r}; expected an integer >= 1")
    return int(text)


def checked_nodes(text: str) -> int:
    """Return the number of nodes. Raises ClusterError."""
    # int() alone would accept more, such as 1_0 and digits of other scripts.
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text) or int(text) > NODES_LIMIT:
        raise ClusterError(
            f"NODES: invalid value {text!r}; expected an integer from 1 to {NODES_LIMIT}: "
            "make compose-up NODES=2"
        )
    return int(text)


def checked_spares(text: str, nodes: int) -> int:
    """Return the number of spares for so many nodes; none by default. Raises ClusterError."""
    if not re.fullmatch(r"[0-9]{0,4}", text) or int(text or 0) > NODES_LIMIT - nodes:
        raise ClusterError(
            f"SPARES: invalid value {text!r}; expected an integer from 0 to {NODES_LIMIT - nodes}: "
            "make compose-up NODES=2 SPARES=1"
        )
    if int(text or 0) and nodes == 1:
        raise ClusterError(f"SPARES={text} needs at least two nodes: make compose-up NODES=2 SPARES={text}")
    return int(text or 0)


def check_gpus(text: str) -> None:
    """Accept an empty text, a number of GPUs per node, or all. Raises ClusterError."""
    if text not in ("", "all") and not re.fullmatch(r"[1-9][0-9]?", text):
        raise ClusterError(
            f"GPUS: invalid value {text!r}; expected 1 to 99 GPUs per node, or all "
            "(every node uses all of the host's GPUs): make compose-up NODES=2 GPUS=1"
        )


def checked_node(text: str) -> int:
    """Return the node's index, from 0. Raises ClusterError."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,3}", text):
        raise ClusterError(f"NODE: invalid value {text!r}; expected an integer >= 0, see make compose-ps")
    return int(text)


def checked_port(text: str) -> int:
    """Return the port number. Raises ClusterError."""
    if not re.fullmatch(r"[1-9][0-9]{0,4}", text) or int(text) > 65535:
        raise ClusterError(f"METRICS_PORT: invalid value {text!r}; expected a port from 1 to 65535")
    return int(text)


def check_free(port: int) -> None:
    """Check that the metrics port is free. Raises ClusterError."""
    with socket.socket() as probe:
        # Without it, connections in TIME_WAIT of an earlier cluster would make the port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(
                f"port {port} of this host is taken ({error.strerror}{_holder(port)}); choose another: "
                f"make compose-up METRICS_PORT={port + 1}"
            ) from None


def _holder(port: int) -> str:
    """Return which container of which project uses the port; empty if none does."""
    shown = '{{.Names}} {{.Label "com.docker.compose.project"}}'
    words = ("--filter", f"publish={port}", "--format", shown)
    name, _, project = docker("ps", *words, check=False).partition("\n")[0].partition(" ")
    if not name:
        return ""
    return f", by container {name}" + (f": make compose-down PROJECT={project}" if project else "")


def check_room_for_a_build(free_bytes: int | None) -> None:
    """Check the free space for images; None means unknown. Raises ClusterError."""
    if free_bytes is not None and free_bytes < BUILD_NEEDS_BYTES:
        raise ClusterError(
            f"only {free_bytes / 1e9:.1f} GB are free where the engine stores images, a build needs "
            f"{BUILD_NEEDS_BYTES / 1e9:.0f}; make room: docker system prune"
        )


def check_volumes(cluster: Cluster) -> None:
    """Check that the volumes are writable and not full; create a working directory. Raises ClusterError."""
    wanted = [cluster.variables["WORKING_DIR"]] if "WORKING_DIR" in cluster.variables else []
    mounts = [word for name in VOLUMES for word in ("-v", f"{cluster.project}_{name}:/{name}")]
    labels = ["--label", "com.docker.compose.project=" + cluster.project]
    for name in VOLUMES:  # like Compose, which would otherwise warn that they are not its own
        own = [*labels, "--label", f"com.docker.compose.volume={name}"]
        docker("volume", "create", *own, f"{cluster.project}_{name}")
    looked = json.loads(
        docker("run", "--rm", "-i", "--network", "none", *mounts, "--entrypoint", "python3", cluster.image,
               "-", *wanted, text=LOOK_AT_VOLUMES)
    )  # fmt: skip
    for folder, owner in looked["foreign"]:
        volume = f"{cluster.project}_{folder.strip('/')}"
        raise ClusterError(
            f"volume {volume} belongs to user {owner}, and tandem is user 10001; hand it over: "
            f"docker run --rm -u 0 -v {volume}:/v --entrypoint chown {cluster.image} -R 10001:10001 /v"
        )
    if looked["free"] < RUN_NEEDS_BYTES:
        raise ClusterError(
            f"only {looked['free'] / 1e9:.1f} GB are free for checkpoints, {RUN_NEEDS_BYTES / 1e9:.0f} are "
            "needed; make room: docker system prune"
        )
