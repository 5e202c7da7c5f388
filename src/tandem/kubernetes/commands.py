"""Run one verb of `tandem k8s`."""

import re
import sys
from dataclasses import dataclass

from tandem.kubernetes import cluster
from tandem.kubernetes.parameters import JOB, option
from tandem.kubernetes.render import ALIASES, FOLDERS, UsageError, parts_of, render, selection_of

KINDS = (*FOLDERS, *ALIASES)
VERBS = ("render", "apply", "logs", "status", "forward", "delete")
READ_BY = {
    "namespace": ("apply", "logs", "status", "forward", "delete"),
    "name": VERBS,
    "nodes": ("render", "apply"),
    "purge": ("delete",),
    "port": ("forward",),
}
"""{option: the verbs that read it}."""
PIPE = "or pipe the manifest: tandem k8s render | kubectl apply --namespace NAME --filename -"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label (RFC 1123)."""
NEW_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
"""A Service's name begins with a letter, and pods are called NAME-node-0-9999 (at most 63 characters)."""
OF_OTHER_OBJECTS = ("-metrics", "-egress")
"""Ends of the names of a job's Services and NetworkPolicies; a job of such a name could replace one."""
MOST_NODES = 10_000


@dataclass(frozen=True)
class K8sCommand:
    """The command that was typed: verb, kind of job, components, and where."""

    verb: str
    kind: str = ""
    components: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    name: str = JOB
    nodes: int | None = None
    purge: bool = False
    port: int = cluster.PORT


def _check(command: K8sCommand) -> None:
    """Raise UsageError for an option that the verb does not read, and for an invalid name."""
    defaults = K8sCommand(command.verb)
    for name, verbs in READ_BY.items():
        value = getattr(command, name)
        if value == getattr(defaults, name):
            continue
        if command.verb not in verbs:
            raise UsageError(
                f"{option(f'--{name}')}: {command.verb} does not read it; "
                f"expected only with {', '.join(verbs)}" + (f"; {PIPE}" if name == "namespace" else "")
            )
        is_new = name == "name" and command.verb in READ_BY["nodes"]  # a new job's name is checked below
        if isinstance(value, str) and not is_new and not NAME.fullmatch(value):
            raise UsageError(
                f"{option(f'--{name}')}: invalid value {value!r}; expected lowercase letters, digits and '-'"
            )
    if command.verb in READ_BY["nodes"]:
        _check_job(command)


def _check_job(command: K8sCommand) -> None:
    """Raise UsageError for the name or number of nodes of a job that Kubernetes could not run."""
    if not NEW_NAME.fullmatch(command.name) or command.name.endswith(OF_OTHER_OBJECTS):
        raise UsageError(
            f"{option('--name')}: invalid value {command.name!r}; expected at most 50 lowercase letters, "
            f"digits and '-', beginning with a letter, not ending with '-' or {' or '.join(OF_OTHER_OBJECTS)}"
        )
    if command.nodes is not None:
        nodes_of(str(command.nodes))


def nodes_of(text: str) -> int:
    """Convert the number of nodes. Raises UsageError."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text) or int(text) > MOST_NODES:
        raise UsageError(
            f"{option('--nodes')}: invalid value {text!r}; expected an integer from 1 to {MOST_NODES}"
        )
    return int(text)


def run(command: K8sCommand) -> int:
    """Run the verb and return its exit code. Raises UsageError with one line."""
    _check(command)
    selection = selection_of(command.kind, command.components)
    is_job = parts_of(selection)[0] != "cluster-runtime"
    if command.name != JOB and not is_job:
        raise UsageError(
            f"{option('--name')}: cluster-runtime is no job; each TrainJob that uses it has its own name"
        )
    # Rendered for every verb: the manifest says which kinds to look for.
    text = render(selection, command.image, command.name, command.nodes)
    if command.verb == "render":
        sys.stdout.write(text)
        return 0
    if command.verb != "apply" and not is_job:
        raise UsageError(
            f"{command.verb}: cluster-runtime is no job, and all namespaces share it; use kubectl, such as "
            "kubectl delete clustertrainingruntime tandem"
        )
    target = cluster.Target(text, command.namespace, command.name, selection)
    if command.verb == "delete":
        return cluster.delete(target, command.purge)
    if command.verb == "forward":
        return cluster.forward(target, command.port)
    return {"apply": cluster.apply, "logs": cluster.logs, "status": cluster.status}[command.verb](target)
