"""The pod security standard 'restricted' (kubernetes.io, Pod Security Standards), for pods on Linux."""

from collections.abc import Iterator
from typing import Any

from tandem_k8s.documents import Document, PodTemplate, pod_templates

VOLUME_TYPES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
SECCOMP_TYPES = ("RuntimeDefault", "Localhost")
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip


def restricted(document: Document) -> list[str]:
    """Return one line for each violation of 'restricted' by a pod of this document.

    tandem also requires a read-only root file system, and no service account token.
    """
    return [
        f"{each.where}: {line}"
        for each in pod_templates(document)
        for line in [*_pod(each), *(line for one in each.containers() for line in _container(one, each))]
    ]


def _pod(each: PodTemplate) -> Iterator[str]:
    spec, context = each.spec, each.spec.get("securityContext") or {}
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is not restricted; leave it out"
    for volume in spec.get("volumes", []):
        for kind in set(volume) - {"name"} - VOLUME_TYPES:
            yield f"volume {volume['name']} is a {kind}; restricted allows {', '.join(sorted(VOLUME_TYPES))}"
    for sysctl in context.get("sysctls", []):
        if sysctl.get("name") not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl.get('name')} is not among the safe ones"
    if context.get("runAsUser") == 0:
        yield "securityContext.runAsUser is 0; give the image's user, 10001"
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false: training never talks to the cluster"


def _container(container: Document, each: PodTemplate) -> Iterator[str]:
    name = f"container {container.get('name')}"
    own, pod = container.get("securityContext") or {}, each.spec.get("securityContext") or {}

    def effective(key: str) -> Any:
        return own[key] if key in own else pod.get(key)

    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} needs allowPrivilegeEscalation: false"
    if effective("runAsNonRoot") is not True:
        yield f"{name} needs runAsNonRoot: true, of its own or of the pod"
    if own.get("runAsUser") == 0:
        yield f"{name} runs as user 0"
    if (effective("seccompProfile") or {}).get("type") not in SECCOMP_TYPES:
        yield f"{name} needs seccompProfile.type {' or '.join(SECCOMP_TYPES)}"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in capabilities.get("drop", []):
        yield f"{name} needs capabilities.drop [ALL]"
    for added in set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds the capability {added}"
    if own.get("procMount", "Default") != "Default":
        yield f"{name} has procMount {own['procMount']}"
    if own.get("readOnlyRootFilesystem") is not True:
        yield f"{name} needs readOnlyRootFilesystem: true; mount volumes for files that must be written"
    for port in container.get("ports", []):
        if port.get("hostPort"):
            yield f"{name} takes hostPort {port['hostPort']}"
