"""A simulated pod: namespaces of its own, a root made from this machine's, and the container's command.

Reads one JSON object (see `simulated_cluster.Cluster`) from standard input once its network is up, and ends
with the exit code of the pod, 128 + N when signal N killed it. Standard library only; needs root.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x20000000 | 0x40000000  # mount, host name, process, network
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    """The sandbox: waits for the pod's process 1 and passes its end on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child == 0:
        run_container()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def run_container() -> None:
    """As process 1: mounts, host name, user, no capabilities; then becomes the command."""
    wanted = json.loads(sys.stdin.readline())
    scratch, root = Path(wanted["scratch"]), Path(wanted["scratch"]) / "root"
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "tmpfs", str(scratch))
    for name in ("upper", "work", "root"):
        (scratch / name).mkdir()
    layers = f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work"
    mount("-t", "overlay", "overlay", "-o", layers, str(root))
    (root / "root").chmod(0o755)  # an interpreter below /root has to be readable for the pod's user
    make_devices(root / "dev")
    mount("-t", "proc", "proc", str(root / "proc"))
    for source, target in wanted["volumes"].items():
        inside = root / target.lstrip("/")
        if Path(source).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.touch()
        mount("--bind", source, str(inside))
    # A checkout below /tmp would be hidden by the pod's own /tmp.
    checkout = root / wanted["checkout"].lstrip("/")
    checkout.mkdir(parents=True, exist_ok=True)
    mount("--bind", wanted["checkout"], str(checkout))
    mount("-o", "remount,bind,ro", str(checkout))
    if wanted["read_only"]:
        mount("-o", "remount,ro", str(root))
    socket.sethostname(wanted["hostname"])
    os.chroot(root)
    os.chdir("/")
    user = ["setpriv", f"--reuid={wanted['user']}", f"--regid={wanted['user']}", "--clear-groups"]
    fence = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    os.execvpe("setpriv", [*user, *fence, *wanted["command"]], wanted["environment"])


def make_devices(folder: Path) -> None:
    """A /dev of the pod's own, as a container's: this machine's has no files of pods."""
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for name in DEVICES:
        (folder / name).touch()
        mount("--bind", f"/dev/{name}", str(folder / name))
    for link, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (folder / link).symlink_to(f"/proc/self/{target}")
    (folder / "shm").mkdir()
    mount("-t", "tmpfs", "tmpfs", str(folder / "shm"))
    (folder / "shm").chmod(0o777)


if __name__ == "__main__":
    main()
