"""A cluster in network namespaces: every pod a machine of its own (`controllers` restarts them).

Each pod has its own network, process, mount and host name namespaces, the manifest's user, no capabilities, a
read-only root, and a new address whenever it is made anew. Names come from one hosts file, which stands for
the cluster's DNS. Nothing outside these namespaces is touched.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import patient
from tandem_k8s.contract import PodPlan

REPOSITORY = Path(__file__).parents[2]
NETWORK = ipaddress.ip_network("10.244.0.0/24")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "tini")
METRICS_PORT = 19469
ASK = """
import sys, urllib.request as r
asks = r.Request(sys.argv[1], headers={"User-Agent": "Prometheus/3.5.0"})
print(r.urlopen(asks, timeout=5).read().decode())
"""
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_BYTES = 4096  # what a kubelet keeps of it


def available() -> tuple[bool, str]:
    """Whether this machine can make such pods, and if not, why."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return False, f"{', '.join(missing)} missing"
    if os.geteuid() != 0:
        return False, "needs root"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return tried.returncode == 0, tried.stderr.decode().strip()


@dataclass
class Pod:
    """One pod that was made; `code` is its exit code as Kubernetes shows it."""

    plan: PodPlan
    address: str
    log: Path
    last_word: Path
    process: subprocess.Popen[str]

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def first_process(self) -> int:
        """The container's process 1, by its number on this machine. Raises ProcessLookupError at its end."""
        pid = self.process.pid
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            raise ProcessLookupError(self.plan.name) from None

    def send(self, number: signal.Signals) -> None:
        """SIGTERM is what a drain sends first; SIGKILL ends the pod as a lost node would."""
        os.kill(self.first_process(), number)

    def output(self) -> str:
        return self.log.read_text()

    def message(self) -> str:
        """Why its container ended, as `kubectl describe pod` shows it."""
        return self.last_word.read_bytes()[:TERMINATION_BYTES].decode()

    def metrics(self) -> str:
        """Its page of /metrics, asked for from within; '' when nobody answers."""
        url = f"http://127.0.0.1:{METRICS_PORT}/metrics"
        inside = ["nsenter", "-t", str(self.process.pid), "-n"]
        asked = [*inside, sys.executable, "-c", ASK, url]
        return subprocess.run(asked, capture_output=True, text=True, timeout=patient(30)).stdout


@dataclass
class Cluster:
    """Starts pods in `folder`; `close` ends them and the fabric that joins them."""

    folder: Path
    image_environment: dict[str, str]
    volumes: dict[str, str]
    pods: list[Pod] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hosts, self._resolver = self.folder / "hosts", self.folder / "nsswitch.conf"
        self._write_hosts()
        self._resolver.write_text("hosts: files\n")  # what is not published is not there; no server is asked
        self._numbers = itertools.count(10)
        self._fabric = subprocess.Popen(["unshare", "--net", "sleep", "600"], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + patient(10)
        while os.readlink(f"/proc/{self._fabric.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline, "no network namespace within 10 s"
            time.sleep(0.01)
        self._inside(self._fabric.pid, "ip link add br0 type bridge", "ip link set br0 up")

    def start(self, plan: PodPlan) -> Pod:
        """Make this pod (anew): a new address, its names in DNS, its command as process 1."""
        number = next(self._numbers)
        address, scratch = str(NETWORK[number]), self.folder / f"pod-{number}"
        scratch.mkdir()
        log, last_word = (self.folder / f"{plan.name}.{number}.{what}" for what in ("log", "termination-log"))
        last_word.touch()
        last_word.chmod(0o666)  # as the kubelet's: whatever user the container has
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "pod_root.py")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        pod = Pod(plan, address, log, last_word, process)
        self.pods.append(pod)
        self._connect(process, number, address)
        self.publish(plan, address)
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._wanted(plan, scratch, last_word)) + "\n")
        process.stdin.close()
        return pod

    def publish(self, plan: PodPlan, address: str) -> None:
        """The pod's names resolve to this address from now on, for all pods."""
        self._names.update(dict.fromkeys((plan.name, *plan.names), address))
        self._write_hosts()

    def forget(self, plan: PodPlan) -> None:
        """The pod's names do not resolve any more."""
        for name in (plan.name, *plan.names):
            self._names.pop(name, None)
        self._write_hosts()

    def close(self) -> None:
        for pod in self.pods:
            with contextlib.suppress(ProcessLookupError):
                pod.send(signal.SIGKILL)  # all processes of the namespace go with its first
            pod.process.wait(timeout=patient(10))
        self._fabric.kill()
        self._fabric.wait(timeout=patient(10))

    def _wanted(self, plan: PodPlan, scratch: Path, last_word: Path) -> dict[str, Any]:
        container = plan.template.container()
        mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        files = {self._hosts: "/etc/hosts", self._resolver: "/etc/nsswitch.conf", last_word: TERMINATION_LOG}
        volumes = dict(self.volumes) | {str(path): target for path, target in files.items()}
        for path in mounts - set(volumes.values()) - {"/dev/shm"}:
            own = self.folder / f"volume-{scratch.name}{path.replace('/', '-')}"
            own.mkdir()
            own.chmod(0o777)
            volumes[str(own)] = path
        return {
            "scratch": str(scratch),
            "hostname": plan.name,
            "user": plan.template.spec["securityContext"]["runAsUser"],
            "read_only": container["securityContext"]["readOnlyRootFilesystem"],
            "volumes": volumes,
            "checkout": str(REPOSITORY),
            "command": list(plan.command),
            "environment": {**self.image_environment, **plan.environment},
        }

    def _connect(self, process: subprocess.Popen[str], number: int, address: str) -> None:
        """A cable from the pod's namespace to the bridge; its end in the pod is eth0."""
        deadline = time.monotonic() + patient(10)
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert process.poll() is None and time.monotonic() < deadline, "no network namespace within 10 s"
            time.sleep(0.01)
        self._inside(
            self._fabric.pid,
            f"ip link add pod{number} type veth peer name eth0 netns {process.pid}",
            f"ip link set pod{number} master br0 up",
        )
        self._inside(
            process.pid, "ip link set lo up", f"ip addr add {address}/24 dev eth0", "ip link set eth0 up"
        )

    def _inside(self, pid: int, *commands: str) -> None:
        for command in commands:
            subprocess.run(["nsenter", "-t", str(pid), "-n", *command.split()], check=True)

    def _write_hosts(self) -> None:
        """In place: the file is mounted into every pod."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        with self._hosts.open("w") as file:
            file.write("\n".join(lines) + "\n")
