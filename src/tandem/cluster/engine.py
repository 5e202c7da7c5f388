"""The container engine through its command line: checked calls, node states, clear errors.

Messages are written with make's words. `typed` translates them for users of `tandem cluster`.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem import layout, shipped
from tandem.cluster.project import OVERRIDE, project_folder
from tandem.errors import MISCONFIGURED, PEER_LOST, TandemError

HERE = shipped.root() / "compose"
"""The directory of the Compose files."""
ROOT = project_folder() or shipped.checkout() or Path.cwd()
"""The directory whose .env is used."""
VARIABLES = "tandem.variables"  # the label that stores the variables, for scale and chaos
OLDEST_COMPOSE = (2, 24)  # the first with optional `env_file` entries
UNFINISHED = ("created", "running", "restarting", "paused")
NO_ENGINE = re.compile(r"cannot connect to the docker daemon|error during connect", re.IGNORECASE)
CALL_SECONDS = 120.0
MONITORING = "monitoring"
"""The Compose profile of Prometheus and Grafana."""
STOP_SECONDS = 120.0
WATCHERS = {
    "prometheus": ("PROMETHEUS_PORT", 9090, "/alerts"),
    "grafana": ("GRAFANA_PORT", 3000, "/d/tandem"),
}
"""Service in monitoring.yaml: (the variable with its port, the default port, the page to open)."""


class ClusterError(TandemError):
    """A request that cannot be fulfilled; a one-line message says what to type next."""

    exit_code = MISCONFIGURED


class EngineGoneError(ClusterError):
    """The engine no longer answers, so the job's result is unknown."""

    exit_code = PEER_LOST  # worth a retry

    def __init__(self) -> None:
        where = os.environ.get("DOCKER_HOST", "its usual socket")
        super().__init__(
            f"the container engine no longer answers at {where}; start it: sudo systemctl start docker, then "
            "see what is left: make compose-ps; the same make compose-up resumes from the newest checkpoint"
        )


@dataclass(frozen=True)
class Node:
    """One replica as the engine sees it. `pid` is the host's process ID of the container's process 1.

    `index` counts from 0, like tandem's nodes. The engine's names count from 1: PROJECT-node-1 is node 0.
    """

    index: int
    name: str
    identity: str
    status: str
    exit_code: int
    pid: int
    starts: int
    started_at: str
    gateway: str
    created: str = ""

    @property
    def is_unfinished(self) -> bool:
        """True if it runs or is about to restart."""
        return self.status in UNFINISHED


def docker(*arguments: str, check: bool = True, seconds: float | None = None, text: str | None = None) -> str:
    """Return the output of a docker command. Raises ClusterError with its last line if it fails.

    With check=False, a failure does not raise ClusterError. EngineGoneError is always raised.
    """
    try:
        ended = in_time(["docker", *arguments], seconds, text=True, input=text)
    except FileNotFoundError:
        raise ClusterError(f"docker is not installed; {_how_to_install()}") from None
    raise_if_gone(ended)
    if ended.returncode and check:
        raise ClusterError(f"`docker {' '.join(arguments[:3])}` failed: {best_error_line(ended)}")
    return str(ended.stdout)


def in_time(
    command: Sequence[str], seconds: float | None = None, name: str = "", **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command and capture its output. Raises ClusterError if it takes longer than `seconds`.

    The default is CALL_SECONDS. If an engine hangs, its commands wait without a limit. `name`: the command in
    the message; by default its first words.
    """
    limit = CALL_SECONDS if seconds is None else seconds
    try:
        return subprocess.run(command, capture_output=True, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        shown = name or " ".join(command[:4])
        raise ClusterError(
            f"`{shown}` took longer than {limit:.0f} s; if the engine hangs, restart it: "
            "sudo systemctl restart docker"
        ) from None


def code_of_removed(identity: str, created: str) -> int | None:
    """Return the exit code of a removed container, from the engine's events; None if it has no such event.

    The end of the window includes a fraction of a second: `--until 0s` is truncated to the current second,
    which would miss an event within it (measured). An engine keeps its last 256 events.
    """
    its = ("--filter", f"container={identity}", "--filter", "event=die")
    window = ("--since", created, "--until", f"{time.time():.9f}")
    codes = docker("events", *window, *its, "--format", "{{.Actor.Attributes.exitCode}}", check=False).split()
    return int(codes[-1]) if codes and codes[-1].isdigit() else None


def raise_if_gone(ended: subprocess.CompletedProcess[str]) -> None:
    """Raise EngineGoneError if a command failed because the engine does not answer.

    Compose prints the same message for a silent registry (2.26), so the engine itself is queried.
    """
    if ended.returncode and NO_ENGINE.search(ended.stderr):
        asked = ["docker", "version", "--format", "{{.Server.Version}}"]
        if in_time(asked).returncode:
            raise EngineGoneError


def best_error_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the most informative line of a failed command's output."""
    lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no output"]
    # The last line may be a hint, such as "See 'docker run --help'".
    return next((line.strip() for line in lines if "error" in line.lower()), lines[-1].strip())


def check_engine() -> None:
    """Check that the engine answers and Compose is new enough. Raises ClusterError."""
    try:
        docker("version", "--format", "{{.Server.Version}}", seconds=20)
    except ClusterError as error:
        if "permission denied" in str(error).lower():
            raise ClusterError(
                "the container engine refuses you; join its group and log in again: "
                "sudo usermod -aG docker $USER"
            ) from None
        if "not installed" in str(error):
            raise
        where = os.environ.get("DOCKER_HOST", "its usual socket")
        raise ClusterError(
            f"the container engine does not answer at {where}; start it: sudo systemctl start docker; "
            f"if there is none, {_how_to_install()}"
        ) from None


def check_compose() -> None:
    """Raise ClusterError if Docker Compose is missing or too old."""
    found = docker("compose", "version", "--short", check=False, seconds=20).strip()
    numbers = re.match(r"v?(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_COMPOSE:
        wanted = ".".join(map(str, OLDEST_COMPOSE))
        raise ClusterError(
            f"docker compose is {found or 'missing'}; {wanted} or newer is needed: install the plugin "
            f"docker-compose-plugin; {_how_to_install()}"
        )


def _how_to_install() -> str:
    if shipped.checkout():
        return "on Debian: sudo make docker-host"
    return "see https://docs.docker.com/engine/install/"


@dataclass(frozen=True)
class Cluster:
    """One Compose project, and the variables of its compose.yaml.

    `watched`: Prometheus and Grafana are part of it (monitoring.yaml). Compose creates the volumes of every
    file it is given, and treats services that are in none of them as orphans.
    """

    project: str
    variables: Mapping[str, str]
    gpus: bool = False
    watched: bool = False

    @property
    def image(self) -> str:
        return self.variables["IMAGE"]

    @property
    def run_dir(self) -> str:
        return f"/checkpoints/{self.variables['RUN']}"

    @classmethod
    def found(cls, project: str) -> "Cluster":
        """Return the running cluster with its original variables. Raises ClusterError if there is none."""
        # -a, because scale and logs also work after the nodes have ended.
        filters = (
            "--filter",
            f"label=com.docker.compose.project={project}",
            "--filter",
            f"label={VARIABLES}",
        )
        kept = docker("ps", "-a", *filters, "--format", f'{{{{.Label "{VARIABLES}"}}}}').splitlines()
        if not kept or not kept[0]:
            raise ClusterError(f"there is no cluster {project} here; start one: make compose-up NODES=2")
        variables = json.loads(kept[0])
        return cls(project, variables, bool(variables.get("GPUS")), is_watched(project))

    def command(self, *arguments: str) -> list[str]:
        """Return the `docker compose` command for this project, as words after `docker`."""
        more = {"monitoring.yaml": self.watched, "gpu.yaml": self.gpus}
        files = ["compose.yaml", *(name for name, wanted in more.items() if wanted)]
        # Compose would look for .env next to the Compose files, and not in the user's directory.
        dotenv = ["--env-file", str(ROOT / ".env")] if (ROOT / ".env").is_file() else []
        chosen = [word for name in files for word in ("-f", str(HERE / name))]
        chosen += ["-f", self.variables[OVERRIDE]] if OVERRIDE in self.variables else []
        # Compose would decide by its own output, which is a pipe.
        colors = ["--ansi", "always" if sys.stdout.isatty() else "never"]
        return ["compose", *colors, "-p", self.project, *dotenv, *chosen, *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment for compose.yaml: the caller's, overridden by this cluster's variables."""
        own = {"COMPOSE_PROJECT_NAME": self.project, "VARIABLES": json.dumps(self.variables)}
        own |= {"COMPOSE_PROFILES": MONITORING} if self.watched else {}
        return {**os.environ, **self.variables, **own}

    def settings(self) -> list[str]:
        """Return the names of the settings that are set in the environment or in .env."""
        known = {*self.environment(), *variables_in_dotenv()}
        return sorted(name for name in known if name.startswith("TANDEM_"))

    def compose(self, *arguments: str, seconds: float | None = None) -> str:
        """Return the output of `docker compose`. Raises ClusterError with the most informative line."""
        with tempfile.NamedTemporaryFile("w", prefix="tandem-", suffix=".env") as names:
            # Only names: Compose looks up the values itself.
            names.writelines(f"{name}\n" for name in self.settings())
            names.flush()
            environment = {**self.environment(), "SETTINGS": names.name}
            command = ["docker", *self.command(*arguments)]
            ended = in_time(command, seconds, f"docker compose {arguments[0]}", text=True, env=environment)
        raise_if_gone(ended)
        if ended.returncode:
            raise ClusterError(f"docker compose {arguments[0]} failed: {best_error_line(ended)}")
        return str(ended.stdout)

    def nodes(self) -> list[Node]:
        """Return the existing replicas, ordered by index."""
        labels = [f"label=com.docker.compose.{key}" for key in (f"project={self.project}", "service=node")]
        found = docker("ps", "-aq", "--filter", labels[0], "--filter", labels[1]).split()
        if not found:
            return []
        # A container may be removed after the listing. `docker inspect` then fails, but prints the others.
        described = json.loads(docker("inspect", *found, check=False) or "[]")
        return sorted((_node(each) for each in described), key=lambda node: node.index)

    def node(self, index: int) -> Node:
        """Return the replica with this index (from 0). Raises ClusterError."""
        nodes = self.nodes()
        for node in nodes:
            if node.index == index:
                return node
        known = ", ".join(str(node.index) for node in nodes) or "none"
        raise ClusterError(f"there is no node {index} in {self.project}; nodes are: {known}")

    def read(self, path: str) -> str | None:
        """Return a file of the checkpoint volume through node 0's container, even if that is stopped."""
        found = self.read_dated(path)
        return None if found is None else found[0]

    def read_dated(self, path: str) -> tuple[str, float] | None:
        """Return a file like `read`, and when it was written (Unix seconds)."""
        # `docker cp`, because `docker exec` needs a running container.
        ended = in_time(["docker", "cp", f"{self.project}-node-1:{path}", "-"])
        if ended.returncode:
            return None
        with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as archive:
            member = archive.getmembers()[0]
            file = archive.extractfile(member)
            return None if file is None else (file.read().decode(), float(member.mtime))

    def events(self) -> list[dict[str, object]]:
        """Return the run's events so far, also from the older file if the log was rotated."""
        found = self._events(layout.EVENTS)
        # A rotated file begins with the counts of the older one.
        if not found or found[0]["kind"] == "counted":
            found = self._events(layout.EVENTS + layout.OLDER) + found[1:]
        return found

    def _events(self, name: str) -> list[dict[str, object]]:
        lines = (self.read(f"{self.run_dir}/{name}") or "").splitlines()
        # The last line may be incomplete, because the run continues to write.
        return [json.loads(line) for line in lines if line.endswith("}")]

    def summary(self) -> dict[str, object] | None:
        """Return the run's summary; None while it runs."""
        text = self.read(f"{self.run_dir}/summary.json")
        return None if text is None else json.loads(text)

    def helper(self, *arguments: str, options: Sequence[str] = (), check: bool = True) -> str:
        """Run a program of the image as root in a separate container, with the given docker options."""
        # No network unless asked for: the helper is root.
        own = ["--rm", "--user", "0", "--network", "none", "--entrypoint", arguments[0]]
        if any(option.startswith("--network") for option in options):
            own = ["--rm", "--user", "0", "--entrypoint", arguments[0]]
        return docker("run", *own, *options, self.image, *arguments[1:], check=check)

    def inside(self, node: Node, program: str, *arguments: str, check: bool = True) -> str:
        """Run Python source in the node's container, as the user that trains."""
        # The source goes through stdin, so it needs no file in the read-only container.
        return docker("exec", "-i", node.identity, "python3", "-", *arguments, text=program, check=check)


def dotenv() -> dict[str, str]:
    """Return the variables in .env of ROOT, parsed approximately like Compose does."""
    try:
        text = (ROOT / ".env").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = re.findall(r"^[ \t]*(?:export[ \t]+)?(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return {name: value.strip("\"'") for name, value in found if value}


def project_word(project: str) -> str:
    """Return the suffix of a command to type for this project."""
    return "" if project == "tandem" else f" PROJECT={project}"


def variables_in_dotenv() -> dict[str, str]:
    """Return the settings among the variables in .env."""
    return {name: value for name, value in dotenv().items() if name.startswith("TANDEM_")}


def is_watched(project: str) -> bool:
    """Return True if this project has a container of Prometheus or Grafana."""
    filters = ("--filter", f"label=com.docker.compose.project={project}", "--format")
    services = docker("ps", "-a", *filters, '{{.Label "com.docker.compose.service"}}').split()
    return not WATCHERS.keys().isdisjoint(services)


def _node(described: Mapping[str, object]) -> Node:
    state = described["State"]
    config = described["Config"]
    network = described["NetworkSettings"]
    assert isinstance(state, dict) and isinstance(config, dict) and isinstance(network, dict)
    return Node(
        index=int(config["Labels"]["com.docker.compose.container-number"]) - 1,
        name=str(described["Name"]).lstrip("/"),
        identity=str(described["Id"]),
        status=str(state["Status"]),
        exit_code=int(state["ExitCode"]),
        pid=int(state["Pid"]),
        # RestartCount does not include the first start.
        starts=int(str(described["RestartCount"])) + 1,
        started_at=str(state["StartedAt"]),
        gateway=next((str(each["Gateway"]) for each in network["Networks"].values()), ""),
        created=str(described["Created"]),
    )


def free_bytes_of_engine() -> int | None:
    """Return the free space for images and volumes; None if the engine is on another machine."""
    root = docker("info", "--format", "{{.DockerRootDir}}", check=False).strip()
    # The engine's directory is a path of its own machine, which may not be this one.
    return shutil.disk_usage(root).free if root and Path(root).is_dir() else None


# Commands and options in messages, as the user types them: make's targets and variables, or `tandem cluster`.

MAKE_VARIABLES = (
    "PROJECT", "NODES", "SPARES", "TASK", "SCRIPT", "SCRIPT_ARGS", "ARGS", "EPOCHS", "RUN", "GPUS", "RATE",
    "LATENCY", "LOSS", "METRICS_PORT", "MONITORING", "IMAGE", "VOLUMES", "TO", "NODE",
)  # fmt: skip
"""make's variables that are options of `tandem cluster`; MEMORY and others are environment variables."""
_COMMAND = re.compile(r"\bmake (?:compose-([a-z]+)|(chaos) FAULT=(\S+))")
_SWITCH = re.compile(r"(?<![\w/.'\"-])(VOLUMES|MONITORING)=1\b")
_OPTION = re.compile(rf"(?<![\w/.'\"-])({'|'.join(MAKE_VARIABLES)})\b(=?)")


class Wording:
    """How messages name commands. `is_make` is False once `tandem cluster` was typed."""

    is_make = True


def typed(text: str) -> str:
    """Return the message with the words of the command line that the user typed."""
    if Wording.is_make:
        return text
    text = _COMMAND.sub(lambda found: f"tandem cluster {found[1] or f'chaos {found[3]}'}", text)
    text = _SWITCH.sub(lambda found: _flag(found[1]), text)
    return _OPTION.sub(lambda found: _flag(found[1]) + (" " if found[2] == "=" else ""), text)


def say(text: str) -> None:
    """Print the message at once."""
    print(typed(text), flush=True)


def _flag(name: str) -> str:
    return "--" + name.lower().replace("_", "-")
