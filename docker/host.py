"""Prepare a Debian machine to build and run tandem's image.

    sudo make docker-host        (python3 docker/host.py)

Uses only the standard library, and installs only what is missing: the engine, its two command-line plugins
and the base image. The engine is Debian's package. If the release is too old to have a plugin (Debian 12),
its single file is extracted from the next release's package. If no registry answers, debootstrap builds the
base image from Debian's packages.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BASE_IMAGE = "debian:bookworm-slim"
SUITE = "bookworm"
NEXT_SUITE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
NOT_IN_SLIM = (
    "var/cache/apt/*",
    "var/lib/apt/lists/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "usr/share/doc/*/changelog*",
)
PLUGINS = {"compose": "docker-compose", "buildx": "docker-buildx"}
PLUGIN_DIR = Path("/usr/local/lib/docker/cli-plugins")
PACKAGED_PLUGINS = "usr/libexec/docker/cli-plugins"
ENGINE_LOG = Path("/var/log/dockerd.log")
PULL_SECONDS = 120
START_SECONDS = 60


class HostError(Exception):
    """This machine cannot be prepared; the message is one line with what to do."""


def works(command: Sequence[str], seconds: float = 60) -> bool:
    """Return True if the command exits with 0 within `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, timeout=seconds).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(command: Sequence[str], **options: object) -> None:
    """Run a command without output. Raises HostError with its last line if it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no output"]
        raise HostError(f"`{' '.join(command)}` ended with {ended.returncode}: {lines[-1]}")


def install(*packages: str) -> None:
    """Install Debian packages. Raises HostError."""
    if not shutil.which("apt-get"):
        raise HostError("this is not a Debian machine (no apt-get); install Docker with Compose v2 by hand")
    run(["apt-get", "update", "-qq"])
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])


def prepare_engine() -> str:
    """Install dockerd, its command line, and the network tools that they need."""
    wanted = {"dockerd": "docker.io", "iptables": "iptables", "tc": "iproute2"}
    missing = [package for program, package in wanted.items() if not shutil.which(program)]
    if missing:
        install(*missing)
    if not shutil.which("docker"):  # a separate package since Debian 13
        install("docker-cli")
    return f"installed {', '.join(missing)}" if missing else "present"


def prepare_plugin(name: str) -> str:
    """Install the command-line plugin `docker NAME`."""
    if works(["docker", name, "version"]):
        return "present"
    package = PLUGINS[name]
    if works(["apt-get", "install", "-y", "-qq", "--no-install-recommends", f"{package}/{NEXT_SUITE}"]):
        return "installed"
    with tempfile.TemporaryDirectory(prefix="tandem-apt-") as folder:
        take_plugin_from(NEXT_SUITE, package, Path(folder))
    if not works(["docker", name, "version"]):
        raise HostError(f"`docker {name} version` still fails with the plugin of {package}")
    return f"taken from {NEXT_SUITE}"


def mirror() -> str:
    """Return the mirror that apt uses, except for security and updates. Raises HostError if there is none."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    for uri, _, name in (line.partition(" ") for line in lines):
        if name and "-" not in name:
            return uri.rstrip("/")
    raise HostError("apt knows no source of Debian packages; add one to /etc/apt/sources.list")


def take_plugin_from(suite: str, package: str, folder: Path) -> None:
    """Extract the plugin from another release's package, without changing apt's own lists."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "sources").write_text(f"deb [signed-by={KEYRING}] {mirror()} {suite} main\n")
    options = [
        f"Dir::Etc::sourcelist={folder}/sources",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::Lists={folder}/lists",
        f"Dir::Cache={folder}",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", "-qq", *[part for option in options for part in ("-o", option)]]
    run([*apt, "update"])
    run([*apt, "download", package], cwd=folder)
    run(["dpkg", "-x", str(next(folder.glob("*.deb"))), str(folder / "files")])
    PLUGIN_DIR.mkdir(parents=True, exist_ok=True)
    for plugin in (folder / "files" / PACKAGED_PLUGINS).iterdir():
        shutil.copy2(plugin, PLUGIN_DIR / plugin.name)


def start_engine() -> str:
    """Start dockerd, with systemd if it is running, else as a background process."""
    if works(["docker", "info"]):
        return "running"
    if Path("/run/systemd/system").is_dir():
        run(["systemctl", "enable", "--now", "docker"])
    else:
        with ENGINE_LOG.open("ab") as log:
            subprocess.Popen(
                ["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
    deadline = time.monotonic() + START_SECONDS
    while not works(["docker", "info"], 10):
        if time.monotonic() > deadline:
            raise HostError(f"the engine did not answer within {START_SECONDS} s; see {ENGINE_LOG}")
        time.sleep(0.5)
    return "started"


def prepare_base_image() -> str:
    """Make sure that the base image exists: present, pulled, or built from Debian's packages."""
    if works(["docker", "image", "inspect", BASE_IMAGE]):
        return "present"
    if works(["docker", "pull", "--quiet", BASE_IMAGE], PULL_SECONDS):
        return "pulled"
    if not shutil.which("debootstrap"):
        install("debootstrap")
    with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", SUITE, str(root), mirror()])
        for pattern in NOT_IN_SLIM:
            for path in root.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            run(["docker", "import", "-", BASE_IMAGE], stdin=archive.stdout)
    return "no registry answers; built from Debian's packages"


def main() -> int:
    """Prepare the machine and print one line per step. Return 2, after one line, if a step fails."""
    if os.geteuid() != 0:
        print("tandem: preparing this machine needs root; type: sudo make docker-host", file=sys.stderr)
        return 2
    steps = [
        ("engine", prepare_engine),
        ("compose plugin", lambda: prepare_plugin("compose")),
        ("buildx plugin", lambda: prepare_plugin("buildx")),
        ("dockerd", start_engine),
        (BASE_IMAGE, prepare_base_image),
    ]
    try:
        for name, step in steps:
            print(f"{name}: {step()}", flush=True)
    except HostError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
