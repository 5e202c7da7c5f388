"""The actions of `tandem cluster` on a cluster of containers: up, down, ps, logs, shell, scale.

`up` returns the job's exit code. `docker compose up` does not: it returns 0 even if a replica exits with 7.
"""

import argparse
import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem import shipped
from tandem.cluster.engine import (
    HERE,
    STOP_SECONDS,
    WATCHERS,
    Cluster,
    ClusterError,
    EngineGoneError,
    docker,
    dotenv,
    free_bytes_of_engine,
    is_watched,
    say,
    variables_in_dotenv,
)
from tandem.cluster.job import ClusterJob
from tandem.cluster.network import LinkShape, check_shape, keep_shape, shape_of
from tandem.cluster.preflight import (
    VOLUMES,
    check_free,
    check_gpus,
    check_room_for_a_build,
    check_volumes,
    checked_epochs,
    checked_node,
    checked_nodes,
    checked_port,
    checked_spares,
)
from tandem.cluster.project import DEFAULT_IMAGE, build_command, image_of, own_variables
from tandem.cluster.project import build as build_image
from tandem.cluster.volume import remove_volumes
from tandem.cluster.workload import work_of
from tandem.config.address import is_secret

# The number of CPU threads of a rank: its share of the host's cores, or its container's limit.

LIMITS = ("CPUS", "MEMORY", "SHM_SIZE", "TMP_SIZE")
OURS = "THREADS_ARE_A_SHARE"
"""A cluster variable that says that TANDEM_THREADS was not set, so `compose-scale` computes it again."""


def limits_given() -> dict[str, str]:
    """Return the limits of each node from the caller's environment; Compose itself reads those in .env.

    Raises ClusterError for a size of /tmp that the kernel would reject: tmpfs(5) does not accept `gb`.
    """
    found = {name: os.environ[name] for name in LIMITS if os.environ.get(name)}
    if "TMP_SIZE" in found:
        size = found["TMP_SIZE"].lower().removesuffix("b")
        if not re.fullmatch(r"[1-9][0-9]*[kmg]?", size):
            raise ClusterError(f"TMP_SIZE={found['TMP_SIZE']} is not a size; expected 512m, 2g...")
        found["TMP_SIZE"] = size
    return found


def share_of(nodes: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return TANDEM_THREADS for a cluster of `nodes` nodes on this host. Raises ClusterError."""
    cpus = checked_cpus(variables.get("CPUS") or dotenv().get("CPUS", ""))
    return {"TANDEM_THREADS": threads_of(os.cpu_count() or 1, nodes, cpus, variables["GPUS"]), OURS: "1"}


def threads_of(cores: int, nodes: int, cpus: float, gpus: str) -> str:
    """Return the threads of a rank; `auto` if the container's limit is at most the node's share.

    With `auto`, tandem reads that limit. Without such a limit, a container sees all cores of the host, which
    its nodes must share.
    """
    if 0 < cpus <= cores / nodes:
        return "auto"
    ranks = int(gpus) if gpus.isdigit() else 1  # one rank per GPU
    # A host can have fewer cores than ranks.
    return str(max(1, cores // nodes // ranks))


def checked_cpus(text: str) -> float:
    """Return the cores that a node may use, 0 for all. Raises ClusterError."""
    if not re.fullmatch(r"([0-9]{1,4}(\.[0-9]*)?)?", text):
        raise ClusterError(
            f"CPUS: invalid value {text!r}; expected a number of cores per node such as 0.5, 1 or 2: "
            "make compose-up CPUS=2"
        )
    return float(text or 0)


# The secret that a Compose project's nodes share: a file on this host, recreated at each start.
#
# Compose mounts it at /run/secrets/job. It is in no label, variable or log. Only its owner can access the
# directory; the file itself is readable by the containers' user.

GIVEN = "TANDEM_JOB_SECRET"
GIVEN_FILE = "TANDEM_JOB_SECRET_FILE"
ROOT = shipped.checkout()


def secret_path(project: str) -> Path:
    """Return the file's path: below build/ of the checkout, else in the user's state directory."""
    if ROOT is not None:
        return ROOT / "build" / "secrets" / project
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "tandem" / "secrets" / project


def make_secret(project: str, given: Mapping[str, str]) -> Path:
    """Write the file with the secret in `given` (variables), or a new one. Raises ClusterError."""
    file = given.get(GIVEN_FILE)
    try:
        text = Path(file).read_text(encoding="utf-8") if file else given.get(GIVEN) or secrets.token_hex(32)
    except (OSError, ValueError) as error:
        raise ClusterError(f"{GIVEN_FILE}: cannot read {file}: {error}; make it readable") from error
    path = secret_path(project)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkdir changes no mode of an existing directory.
    path.parent.chmod(0o700)
    # An existing file may be a link or belong to another user, so the secret is written to a new one.
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o444)  # regardless of the umask
        out.write(text)
    return path


def remove_secret(project: str) -> None:
    secret_path(project).unlink(missing_ok=True)


START_SECONDS = 300.0
LAST_LINES_SECONDS = 3.0
DOWN_TRIES = 4
DOWN_AGAIN_SECONDS = 1.0
METRICS_PORT = 19469


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options of `up` describe; needs no engine. Raises ClusterError."""
    nodes = checked_nodes(options.nodes)
    LinkShape(options.rate, options.latency, options.loss).check()
    port = checked_port(options.metrics_port or str(METRICS_PORT))
    check_gpus(options.gpus)
    variables = variables_of(options, nodes, port) | {"SECRET_FILE": str(secret_path(options.project))}
    return Cluster(options.project, variables, bool(options.gpus), options.monitoring == "1")


def up(options: argparse.Namespace) -> int:
    """Build if needed, start, follow, and return the job's code."""
    cluster = cluster_of(options)
    # Without monitoring.yaml, Compose would remove a running Prometheus as an orphan.
    cluster = replace(cluster, watched=cluster.watched or is_watched(options.project))
    shape = shape_of(cluster)
    port = int(cluster.variables["METRICS_PORT"])
    unfinished = [node for node in cluster.nodes() if node.is_unfinished]
    if unfinished:
        raise ClusterError(
            f"cluster {cluster.project} is running ({len(unfinished)} nodes); "
            "stop it first: make compose-down"
        )
    # The forwarder of an ended job may still hold the port, which is checked next.
    remove_metrics(cluster)
    check_free(port)
    if not options.image:
        build(cluster)
    # After the build, because these checks run in a container of the image.
    check_shape(cluster, shape)
    check_volumes(cluster)
    shaped = f", {shape}" if shape else ""
    say(f"cluster      {cluster.project}: {cluster.variables['NODES']} nodes from {cluster.image}{shaped}")
    say(f"metrics      http://localhost:{port}/metrics")
    # A script decides where its checkpoints are.
    name, where = ("run", "") if options.script else ("checkpoints", "/checkpoints")
    say(f"{name:<12} {cluster.run_dir}{where} in volume {cluster.project}_checkpoints")
    make_secret(options.project, {**variables_in_dotenv(), **os.environ})
    if options.monitoring == "1":
        watch(cluster)
    start(cluster)
    job = ClusterJob.of(cluster)
    forwarder = metrics_containers(cluster)
    follow(job)
    # But not a new one of `compose-scale`, which stops this job and starts another.
    remove_metrics(cluster, forwarder)
    code, line = job.result()
    say(line)
    return code


def variables_of(options: argparse.Namespace, nodes: int, port: int) -> dict[str, str]:
    """Return the variables of compose.yaml, from the options and the caller's TANDEM_* variables.

    Secrets are left out, because all variables become a label. The job's secret is in a file.
    """
    spares = checked_spares(options.spares, nodes)
    given = {name: value for name, value in os.environ.items() if name.startswith("TANDEM_") and value}
    kept_out = GIVEN_FILE, *filter(is_secret, given)
    given = {name: value for name, value in given.items() if name not in kept_out}
    everything = {**variables_in_dotenv(), **given}
    variables = {
        **given,
        "NODES": str(nodes + spares),
        **({"TANDEM_SPARES": str(spares)} if spares else {}),
        "IMAGE": image_of(options),
        "METRICS_PORT": str(port),
        "GPUS": options.gpus,
        "RATE": options.rate,
        "LATENCY": options.latency,
        "LOSS": options.loss,
        **limits_given(),
        **work_of(options, everything),
        **own_variables(options),
    }
    if shipped.checkout() is None:  # an installed wheel has no examples
        variables.setdefault("TASKS", str(HERE))
    # Compose resolves a relative path from the Compose file's directory, not from the user's.
    if rules := os.environ.get("RULES"):
        variables["RULES"] = str(Path(rules).resolve())
        if not Path(rules).is_file():
            raise ClusterError(f"RULES={rules}: there is no such file; monitoring/rules.yaml is the default")
    # All nodes are on this host, so each rank uses its share of the cores, not all of them.
    if "TANDEM_THREADS" not in everything:
        variables |= share_of(nodes, variables)
    if options.epochs:
        variables["TANDEM_EPOCHS"] = str(checked_epochs(options.epochs))
    return variables


def build(cluster: Cluster) -> None:
    """Build the image, which takes seconds if nothing has changed. Raises ClusterError."""
    command = build_command(cluster.image)
    if command is None:
        raise ClusterError(
            "no image is given, and this folder has no Dockerfile to build one; expected IMAGE=NAME, or a "
            "project directory: tandem init DIR"
        )
    if not docker("image", "inspect", "--format", "{{.Id}}", cluster.image, check=False).strip():
        # A later build reuses the layers of the first one, so only that one needs the room.
        check_room_for_a_build(free_bytes_of_engine())
        say(f"image        {cluster.image} is not there: building it, which takes minutes")
    if not build_image(command):
        again = "make image" if command[0] == "make" else shlex.join(command)
        raise ClusterError(f"the image cannot be built (see above); try: {again}")


def watch(cluster: Cluster) -> None:
    """Start Prometheus and Grafana, or keep them running: they outlive the job. Raises ClusterError."""
    try:
        cluster.compose("up", "--detach", *WATCHERS, seconds=START_SECONDS)
    except EngineGoneError:
        raise
    except ClusterError as error:
        raise ClusterError(
            f"MONITORING=1: {error}; Prometheus and Grafana need their images here, or a registry; name "
            "others with PROMETHEUS_IMAGE=NAME GRAFANA_IMAGE=NAME, or leave MONITORING=1 out"
        ) from None
    for name, (variable, port, page) in WATCHERS.items():
        say(f"{name:<12} http://localhost:{os.environ.get(variable) or port}{page}")


def start(cluster: Cluster) -> None:
    """Recreate all containers of the job in the background, but not Prometheus and Grafana.

    The old nodes are removed first. If there are now fewer nodes, Compose 2.26 may keep a later one, and node
    0 would be missing.
    """
    job = ("node", "metrics")
    cluster.compose("rm", "--force", "node", seconds=STOP_SECONDS)
    fresh = ("--force-recreate", "--remove-orphans", "--no-build")
    cluster.compose("up", "--detach", *fresh, *job, seconds=START_SECONDS)


def follow(job: ClusterJob) -> None:
    """Show the logs until no node runs or is about to restart. Ctrl-C stops the nodes."""
    with subprocess.Popen(
        ["docker", *job.cluster.command("logs", "--follow", "node")],
        env=job.cluster.environment(),
        stdout=subprocess.PIPE,
        # Ctrl-C must not end the logs: they show how the nodes save.
        start_new_session=True,
    ) as logs:
        threading.Thread(target=show, args=[logs], daemon=True).start()
        try:
            job.wait()
        except KeyboardInterrupt:
            say("\nstopping: every node saves and ends; a second Ctrl-C kills them")
            job.stop()
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                logs.wait(LAST_LINES_SECONDS)
            logs.terminate()


def show(logs: subprocess.Popen[bytes]) -> None:
    """Print Compose's lines without the "erase line" sequence that 2.26 adds, even outside a terminal."""
    assert logs.stdout is not None
    for line in logs.stdout:
        sys.stdout.buffer.write(line.replace(b"\x1b[2K", b""))
        sys.stdout.buffer.flush()


def metrics_containers(cluster: Cluster) -> list[str]:
    """Return the IDs of the forwarder's containers, usually one or none."""
    labels = [f"label=com.docker.compose.{key}" for key in (f"project={cluster.project}", "service=metrics")]
    return docker("ps", "-aq", "--no-trunc", "--filter", labels[0], "--filter", labels[1]).split()


def remove_metrics(cluster: Cluster, containers: Sequence[str] | None = None) -> None:
    """Remove the forwarder, which has nothing left to forward to; if `containers` is given, only those.

    Another command may remove it at the same time. When this returns, it is gone in any case.
    """
    deadline = time.monotonic() + STOP_SECONDS
    while found := [each for each in metrics_containers(cluster) if containers is None or each in containers]:
        docker("rm", "--force", *found, check=False)
        if time.monotonic() > deadline:
            raise ClusterError(f"container {found[0][:12]} cannot be removed; see docker ps -a")


def down(options: argparse.Namespace) -> int:
    """Stop a running job and report its result; then remove containers, network and optionally volumes."""
    # With `watched`, Compose also removes Prometheus and Grafana.
    cluster = Cluster(options.project, {}, watched=True)
    # `down` alone would remove the nodes without a report of the job's result.
    end(options.project)
    everything = ["--volumes"] if options.volumes == "1" else []
    remove_all(cluster, everything)
    if everything:
        remove_volumes([f"{options.project}_{name}" for name in VOLUMES])
    remove_secret(options.project)
    kept = "removed" if everything else f"kept (VOLUMES=1 removes {options.project}_checkpoints and _data)"
    say(f"cluster {options.project} is down; volumes {kept}")
    network = f"{options.project}_default"
    connected = "{{range .Containers}}{{.Name}} {{end}}"
    # Compose keeps a network that others use.
    if names := docker("network", "inspect", "--format", connected, network, check=False).split():
        say(f"network {network} stays, because {', '.join(names)} is connected to it")
    return 0


def remove_all(cluster: Cluster, more: Sequence[str], pause: float = DOWN_AGAIN_SECONDS) -> None:
    """Run `docker compose down`, and retry after `pause` seconds if it fails. Raises ClusterError.

    An `up` in another terminal may be removing its forwarder or reading the volume at the same time.
    """
    for left in range(DOWN_TRIES, -1, -1):
        try:
            cluster.compose("down", "--remove-orphans", *more, seconds=STOP_SECONDS)
            return
        except EngineGoneError:
            raise
        except ClusterError:
            if not left:
                raise
            time.sleep(pause)


def end(project: str) -> None:
    """Stop a running job like `docker stop` and report its result; its nodes still exist afterward."""
    by_hand = {"RUN": os.environ.get("RUN") or "digits", "IMAGE": os.environ.get("IMAGE") or DEFAULT_IMAGE}
    cluster = Cluster(project, by_hand, watched=True)  # the defaults of compose.yaml
    # Plain `docker compose` leaves the label with the variables empty.
    with contextlib.suppress(ClusterError):
        cluster = Cluster.found(project)
    job = ClusterJob.of(cluster)
    if not job.unfinished:
        return
    say("stopping: every node saves and ends; Ctrl-C kills them")
    job.stop()
    say(job.result()[1])


def ps(options: argparse.Namespace) -> int:
    """List the nodes, one per line."""
    nodes = Cluster(options.project, {}).nodes()
    for node in nodes:
        ended = "" if node.is_unfinished else f" with {node.exit_code}"
        say(f"node {node.index}  {node.name}  {node.status}{ended}, started {node.starts} times")
    if not nodes:
        say(f"no nodes in {options.project}; start some: make compose-up NODES=2")
    return 0


def logs(options: argparse.Namespace) -> int:
    """Show the logs so far, and new lines while nodes run."""
    cluster = Cluster.found(options.project)
    follow_command = ["docker", *cluster.command("logs", "--follow", "node")]
    with subprocess.Popen(follow_command, env=cluster.environment(), stdout=subprocess.PIPE) as following:
        show(following)
    return following.returncode


def shell(options: argparse.Namespace) -> int:
    """Open a shell in a running node."""
    node = Cluster(options.project, {}).node(checked_node(options.node))
    if node.status != "running":
        raise ClusterError(
            f"node {node.index} is {node.status}; a shell needs one that runs: make compose-ps"
        )
    return subprocess.call(["docker", "exec", "-it", node.identity, "bash"])


def scale(options: argparse.Namespace) -> int:
    """Stop all nodes after a checkpoint and start the requested number, which resume from it."""
    found = Cluster.found(options.project)
    nodes = checked_nodes(options.nodes)
    before = len(found.nodes())
    ClusterJob.of(found).stop()
    remove_metrics(found)
    secret = make_secret(found.project, {**variables_in_dotenv(), **os.environ})
    containers = nodes + int(found.variables.get("TANDEM_SPARES") or 0)
    more = {**limits_given(), "NODES": str(containers), "SECRET_FILE": str(secret)}
    variables = {**found.variables, **more}
    # A number of threads that the user chose stays.
    if OURS in variables:
        variables |= share_of(nodes, variables)
    cluster = replace(found, variables=variables)
    start(cluster)
    # New containers have new networks, and the `up` that would shape them has ended.
    keep_shape(cluster, {})
    say(f"cluster {cluster.project}: {before} nodes stopped, {nodes} started; see them: make compose-logs")
    return 0
