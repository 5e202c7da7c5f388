"""Run one verb of `tandem k8s`."""

import sys
from dataclasses import dataclass

from tandem.kubernetes import cluster, following, forwarding
from tandem.kubernetes.render import ALIASES, FOLDERS, UsageError, parts_of, render, selection_of

KINDS = (*FOLDERS, *ALIASES)
VERBS = ("render", "apply", "logs", "status", "forward", "delete")


@dataclass(frozen=True)
class Asked:
    """What was typed: the kind of job and its components, and where."""

    verb: str
    kind: str = ""
    components: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    run: str = "tandem"
    purge: bool = False
    port: int = forwarding.PORT


def run(asked: Asked) -> int:
    """Run the verb and return its exit code. Raises UsageError with one line."""
    selection = selection_of(asked.kind, asked.components)
    text = render(selection, asked.image)
    if asked.verb == "render":
        sys.stdout.write(text)
        return 0
    if asked.verb != "apply" and parts_of(selection)[0] == "cluster-runtime":
        raise UsageError(
            f"{asked.verb}: cluster-runtime is no job, and all namespaces share it; use kubectl, such as "
            "kubectl delete clustertrainingruntime tandem"
        )
    target = cluster.Target(text, asked.namespace, asked.run, selection)
    if asked.verb == "delete":
        return cluster.delete(target, asked.purge)
    if asked.verb == "forward":
        return forwarding.forward(target, asked.port)
    return {"apply": cluster.apply, "logs": following.logs, "status": cluster.status}[asked.verb](target)
