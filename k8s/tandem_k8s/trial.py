"""`make k8s-try`: start a cluster on this machine, and the job in it."""

import shutil
import subprocess

from tandem import shipped
from tandem.kubernetes.cluster import OPERATOR, Target, apply, ask, logs
from tandem.kubernetes.render import DEFAULT_IMAGE, GET_KUBECTL, UsageError, render

OPERATOR_SECONDS = 300
KIND_CLUSTER = "tandem"
GET = {
    "kind": "kind or minikube (kind.sigs.k8s.io/docs/user/quick-start)",
    "docker": "docker (on Debian: sudo make docker-host)",
    "kubectl": f"kubectl ({GET_KUBECTL})",
}


def try_it(image: str) -> int:
    """Create a cluster on this machine with the image, operator and cpu overlay; then follow the logs."""
    tool = next((name for name in ("kind", "minikube") if shutil.which(name)), "")
    needed = {"kind": tool, "docker": shutil.which("docker"), "kubectl": shutil.which("kubectl")}
    missing = [GET[name] for name, found in needed.items() if not found]
    if missing:
        raise UsageError(f"make k8s-try creates a cluster here; first install {'; '.join(missing)}")
    image = image or f"{DEFAULT_IMAGE}:cpu"
    steps = [["make", "image", "TORCH=cpu", f"IMAGE={image}"], *_cluster_steps(tool, image)]
    steps.append(["kubectl", "apply", "--server-side", "--kustomize", OPERATOR])
    steps.append(["kubectl", "--namespace", "kubeflow", "rollout", "status", "deployment/training-operator",
                  f"--timeout={OPERATOR_SECONDS}s"])  # fmt: skip
    for step in steps:
        print("+", " ".join(step), flush=True)
        if subprocess.run(step, cwd=shipped.root()).returncode != 0:
            raise UsageError(f"this failed: {' '.join(step)}")
    target = Target(render("cpu", image), "default")
    code = apply(target)
    if code != 0:
        return code
    ready = ("--for=condition=Ready", f"--timeout={OPERATOR_SECONDS}s")
    subprocess.run(target.kubectl("wait", "pod", "--selector", target.selector, *ready))
    return logs(target)


def _cluster_steps(tool: str, image: str) -> list[list[str]]:
    if tool == "minikube":
        running = ask(["minikube", "status"]).returncode == 0
        return [*([] if running else [["minikube", "start"]]), ["minikube", "image", "load", image]]
    clusters = ask(["kind", "get", "clusters"]).stdout.split()
    create = [] if KIND_CLUSTER in clusters else [["kind", "create", "cluster", "--name", KIND_CLUSTER]]
    use = ["kubectl", "config", "use-context", f"kind-{KIND_CLUSTER}"]
    return [*create, use, ["kind", "load", "docker-image", image, "--name", KIND_CLUSTER]]
