"""Run one verb of `tandem k8s`."""

import re
import sys
from dataclasses import dataclass

from tandem.kubernetes import cluster, following, forwarding
from tandem.kubernetes.render import ALIASES, FOLDERS, UsageError, parts_of, render, selection_of
from tandem.kubernetes.spoken import option

KINDS = (*FOLDERS, *ALIASES)
VERBS = ("render", "apply", "logs", "status", "forward", "delete")
RUN = "tandem"
"""The label app.kubernetes.io/instance in the manifests."""
READ_BY = {
    "namespace": ("apply", "logs", "status", "forward", "delete"),
    "run": ("logs", "status", "forward", "delete"),
    "purge": ("delete",),
    "port": ("forward",),
}
"""{option: the verbs that read it}."""
PIPE = "or pipe the manifest: tandem k8s render | kubectl apply --namespace NAME --filename -"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label (RFC 1123)."""


@dataclass(frozen=True)
class Asked:
    """The command that was typed: verb, kind of job, components, and where."""

    verb: str
    kind: str = ""
    components: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    run: str = RUN
    purge: bool = False
    port: int = forwarding.PORT


def _check(asked: Asked) -> None:
    """Raise UsageError for an option that the verb does not read, and for an invalid name."""
    defaults = Asked(asked.verb)
    for name, verbs in READ_BY.items():
        value = getattr(asked, name)
        if value == getattr(defaults, name):
            continue
        if asked.verb not in verbs:
            raise UsageError(
                f"{option(f'--{name}')}: {asked.verb} does not read it; expected only with {', '.join(verbs)}"
                + (f"; {PIPE}" if name == "namespace" else "")
            )
        if isinstance(value, str) and not NAME.fullmatch(value):
            raise UsageError(
                f"{option(f'--{name}')}: invalid value {value!r}; expected lowercase letters, digits and '-'"
            )


def run(asked: Asked) -> int:
    """Run the verb and return its exit code. Raises UsageError with one line."""
    _check(asked)
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
