"""Debian's podman in a store of its own: a stand-in image under the real name, and pods of it.

`podman kube play` takes a Pod, so a template becomes one: its environment as its controller would set it, for
one node; volumes of this machine's programs in place of an image of several gigabytes; the claim as a named
volume. Everything else, the security contexts and probes first, is as the manifest says.
"""

import copy
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import yaml
from simulated_cluster import REPOSITORY

from patience import patient
from tandem_k8s.contract import PodPlan
from tandem_k8s.documents import Document

LIMIT_SECONDS = 60
USER = 10001  # of the real image, which owns /checkpoints and /data there too
PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives")  # Debian's, by links or not
PYTHON = (sys.base_prefix, str((REPOSITORY / ".venv").resolve()), str(REPOSITORY))


class Podman:
    """Calls podman with storage below `folder`, and with limits that an unprivileged runner allows."""

    def __init__(self, folder: Path) -> None:
        self._run = Path(tempfile.mkdtemp(prefix="podman-"))  # podman refuses more than 50 characters here
        self._store = ["--root", str(folder / "store"), "--runroot", str(self._run)]
        self._environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        runtime = "runc" if shutil.which("runc") else "crun"  # crun refuses hosts with both cgroup versions
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=10000:10000"]\n'
            f'[engine]\nruntime = "{runtime}"\n'
        )

    def call(self, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["podman", *self._store, *arguments],
            input=stdin,
            capture_output=True,
            timeout=patient(LIMIT_SECONDS),
            env=self._environment,
        )

    def output(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Standard output; fails the test when the command fails."""
        done = self.call(*arguments, stdin=stdin)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr.decode()}"
        return done.stdout.decode()

    def works(self) -> tuple[bool, str]:
        """Whether a pod can start here at all."""
        self.build("probe:latest")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": {"containers": [
            {"name": "one", "image": "probe:latest", "imagePullPolicy": "Never", "command": ["/bin/true"],
             "volumeMounts": _mounts()}], "volumes": _volumes()}}  # fmt: skip
        done = self.play(pod)
        return done.returncode == 0, done.stderr.decode().strip()[-300:]

    def build(self, name: str) -> None:
        """An image of empty directories, under the real name; the programs come as volumes."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path in (
                "etc",
                "tmp",
                "proc",
                "sys",
                "dev",
                "run",
                "var",
                "root",
                "task",
                "checkpoints",
                "data",
            ):
                entry = tarfile.TarInfo(path)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if path == "tmp" else 0o755
                entry.uid = entry.gid = USER if path in ("checkpoints", "data") else 0
                tar.addfile(entry)
            users = b"root:x:0:0::/root:/bin/sh\ntandem:x:10001:10001::/tmp:/bin/sh\n"
            entry = tarfile.TarInfo("etc/passwd")
            entry.size = len(users)
            tar.addfile(entry, io.BytesIO(users))
        self.output("import", "-", f"localhost/{name}", stdin=archive.getvalue())

    def play(self, pod: Document) -> subprocess.CompletedProcess[bytes]:
        return self.call(
            "kube", "play", "--network", "none", "--no-hosts", "-", stdin=yaml.safe_dump(pod).encode()
        )

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(json.loads(self.output("inspect", container))[0])

    def reset(self) -> None:
        self.call("pod", "rm", "--all", "--force", "--time", "0")
        self.call("system", "reset", "--force")
        shutil.rmtree(self._run, ignore_errors=True)


def _mount(name: str, path: str) -> Document:
    return {"name": name, "mountPath": path, "readOnly": True}


def _mounts() -> list[Document]:
    return [_mount(f"host-{i}", path) for i, path in enumerate(_paths())]


def _volumes() -> list[Document]:
    return [{"name": f"host-{i}", "hostPath": {"path": path}} for i, path in enumerate(_paths())]


def _paths() -> list[str]:
    return [path for path in (*PROGRAMS, *PYTHON) if Path(path).exists()]


def as_pod(plan: PodPlan, task: Path) -> Document:
    """The Pod that the controller would make of this plan, able to run beside this machine's files."""
    spec = copy.deepcopy(plan.template.spec)
    spec["hostname"] = plan.name
    spec.setdefault("restartPolicy", "Never")  # ExitCode: the operator makes pods with Never
    container = next(one for one in spec["containers"] if one["name"] == plan.template.main)
    image = {
        "PATH": f"{REPOSITORY}/.venv/bin:/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY / "src"),
        "LANG": "C.UTF-8",
    }
    del container["ports"]  # podman would publish them on this machine
    container["env"] = [{"name": k, "value": v} for k, v in {**image, **plan.environment}.items()]
    hosts = task / "hosts"  # stands for the cluster's DNS
    hosts.write_text(f"127.0.0.1 localhost {' '.join(dict.fromkeys((plan.name, *plan.names)))}\n")
    files = {"task": (task, "/task", "Directory"), "hosts": (hosts, "/etc/hosts", "File")}
    container["volumeMounts"] += [*_mounts(), *(_mount(name, path) for name, (_, path, _) in files.items())]
    spec["volumes"] += _volumes()
    for name, (source, _, kind) in files.items():
        spec["volumes"].append({"name": name, "hostPath": {"path": str(source), "type": kind}})
    metadata = {"name": plan.name, "labels": dict(plan.template.labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
