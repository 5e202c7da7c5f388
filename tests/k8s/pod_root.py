"""First process of a simulated pod: makes the container's root from this machine's, then runs its command.

Started by `unshare` as process 1 of its own mount, host name, process and network namespaces; reads one JSON
object (see `simulated_cluster.Pod`) from standard input once its network is up. Standard library only.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    scratch, root = Path(wanted["scratch"]), Path(wanted["scratch"]) / "root"
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "tmpfs", str(scratch))
    for name in ("upper", "work", "root"):
        (scratch / name).mkdir()
    layers = f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work"
    mount("-t", "overlay", "overlay", "-o", layers, str(root))
    (root / "root").chmod(0o755)  # an interpreter below /root has to be readable for the pod's user
    mount("--rbind", "/dev", str(root / "dev"))
    mount("-t", "tmpfs", "tmpfs", str(root / "dev/shm"))
    (root / "dev/shm").chmod(0o777)
    mount("-t", "proc", "proc", str(root / "proc"))
    for source, target in wanted["volumes"].items():
        inside = root / target.lstrip("/")
        if Path(source).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        mount("--bind", source, str(inside))
    if wanted["read_only"]:
        mount("-o", "remount,ro", str(root))
    socket.sethostname(wanted["hostname"])
    os.chroot(root)
    os.chdir("/")
    user = ["setpriv", f"--reuid={wanted['user']}", f"--regid={wanted['user']}", "--clear-groups"]
    fence = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    os.execvpe("setpriv", [*user, *fence, *wanted["command"]], wanted["environment"])


if __name__ == "__main__":
    main()
