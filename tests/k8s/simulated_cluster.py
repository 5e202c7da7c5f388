"""A cluster in network namespaces: every pod a machine of its own, restarted as its controller would.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import patient
from tandem_k8s.contract import PodPlan
from tandem_k8s.documents import Document
from tandem_k8s.rules import action_for

REPOSITORY = Path(__file__).parents[2]
NETWORK = ipaddress.ip_network("10.244.0.0/24")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "tini")


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


@dataclass
class Cluster:
    """Starts pods in `folder`; `close` ends them and the fabric that joins them."""

    folder: Path
    image_environment: dict[str, str]
    volumes: dict[str, str]
    pods: list[Pod] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hosts = self.folder / "hosts"
        self._write_hosts()
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
        log = self.folder / f"{plan.name}.{number}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "pod_root.py")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        pod = Pod(plan, address, log, process)
        self.pods.append(pod)
        self._connect(process, number, address)
        self.publish(plan, address)
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._wanted(plan, scratch)) + "\n")
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
            pod.process.wait(timeout=10)
        self._fabric.kill()
        self._fabric.wait(timeout=10)

    def _wanted(self, plan: PodPlan, scratch: Path) -> dict[str, Any]:
        container = plan.template.container()
        mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        volumes = dict(self.volumes) | {str(self._hosts): "/etc/hosts"}
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


@dataclass
class Controller:
    """Keeps a job's pods as its controller does, by the exit codes alone; `states` is what it reported."""

    cluster: Cluster
    documents: list[Document]
    plans: list[PodPlan]
    states: list[str] = field(default_factory=list)
    codes: list[tuple[str, int]] = field(default_factory=list)
    current: dict[str, Pod] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)

    def start(self) -> None:
        for plan in self.plans:
            self.current[plan.name] = self.cluster.start(plan)

    def run(self, limit_seconds: float, each_round: Callable[[], None] = lambda: None) -> str:
        """Until the job has ended: Succeeded or Failed. Fails the test after `limit_seconds`."""
        deadline = time.monotonic() + patient(limit_seconds)
        while True:
            each_round()
            state = self.look()
            if state in ("Succeeded", "Failed"):
                return state
            assert time.monotonic() < deadline, f"the job did not end; {self.codes}\n{self.logs()}"
            time.sleep(0.05)

    def look(self) -> str:
        """One reconciliation: pods that ended are judged, and made anew where the controller would."""
        decision = decide(self.documents)
        for name, pod in list(self.current.items()):
            code = pod.code
            if code is None or name in self.succeeded:
                continue
            self.codes.append((name, code))
            action = decision(pod.plan, code)
            if action == "done":
                self.succeeded.add(name)
            elif action == "Failed":
                return self._report("Failed")
            elif action == "gang":
                return self._gang()
            else:
                self._report("Restarting")
                self.cluster.forget(pod.plan)
                self.current[name] = self.cluster.start(pod.plan)
        if not self._complete():
            return self._report("Running")
        for pod in self.current.values():  # cleanPodPolicy Running, and what a Job does with the rest
            with contextlib.suppress(ProcessLookupError):
                pod.send(signal.SIGTERM)
        return self._report("Succeeded")

    def _gang(self) -> str:
        for pod in self.current.values():
            if pod.code is None:
                pod.send(signal.SIGKILL)
                pod.process.wait(timeout=10)
        self.succeeded.clear()
        self.start()
        return self._report("Restarting")

    def _complete(self) -> bool:
        """Master: its success is the job's. elasticPolicy: any worker's (kubeflow/trainer pull request 1752).
        Job: its successPolicy. Otherwise: every pod."""
        by_kind = {document["kind"]: document for document in self.documents}
        needed = {plan.name for plan in self.plans}
        if any(plan.role == "Master" for plan in self.plans):
            needed = {plan.name for plan in self.plans if plan.role == "Master"}
        elif "elasticPolicy" in by_kind.get("PyTorchJob", {}).get("spec", {}):
            return bool(self.succeeded)
        elif "Job" in by_kind and "successPolicy" in by_kind["Job"]["spec"]:
            (rule,) = by_kind["Job"]["spec"]["successPolicy"]["rules"]
            indexes = {int(index) for index in rule["succeededIndexes"].split(",")}
            needed = {plan.name for plan in self.plans if plan.index in indexes}
        return needed <= self.succeeded

    def _report(self, state: str) -> str:
        if not self.states or self.states[-1] != state:
            self.states.append(state)
        return state

    def logs(self) -> str:
        return "\n".join(f"== {pod.log.name}: {pod.code}\n{pod.output()}" for pod in self.cluster.pods)


def decide(documents: Iterable[Document]) -> Callable[[PodPlan, int], str]:
    """(pod, exit code) -> done, anew, gang or Failed, by the rules of the manifest's controller."""
    by_kind = {document["kind"]: document for document in documents}
    if "PyTorchJob" in by_kind:
        return lambda plan, code: "done" if code == 0 else "anew" if code >= 128 else "Failed"
    if "Job" in by_kind:
        spec, counted = by_kind["Job"]["spec"], "anew"  # within backoffLimit
    else:
        runtime = by_kind.get("JobSet") or by_kind["TrainingRuntime"]["spec"]["template"]
        spec, counted = runtime["spec"]["replicatedJobs"][0]["template"]["spec"], "gang"
    actions = {"Ignore": "anew", "Count": counted, "FailJob": "Failed"}
    return lambda plan, code: "done" if code == 0 else actions[action_for(spec, code)]
