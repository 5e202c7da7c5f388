"""Generate the Helm chart from the same kinds and components as the other manifests.

Each kind has one template: the kind's rendering, with the lines that a component adds or changes inside a
condition. A new component needs no code here.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from tandem import __version__
from tandem.kubernetes.parameters import NODES, marked
from tandem.kubernetes.render import NEEDS, render_parts
from tandem_k8s.documents import ROOT, Document, load

CHART = ROOT / "chart"
KINDS = ("pytorchjob", "trainjob", "jobset", "indexed-job")
COMPONENTS = ("gpu", "rdma", "kueue", "network")
"""The others need kustomize: script and monitoring add files, elastic has other pods, cpu another image."""
NOTICE = "{{- /* Generated from the kinds and components of k8s/ by `make k8s-generate`; edit those. */}}\n"
VALUES = {
    "name": "{{ .Release.Name }}",
    "managed": "{{ .Release.Service }}",
    "image": "{{ .Values.image | quote }}",
    "nodes": "{{ .Values.nodes }}",
    "nodes-text": "{{ .Values.nodes | quote }}",
    "workers": "{{ sub .Values.nodes 1 }}",
    "cpu": "{{ .Values.cpu | quote }}",
    "memory": "{{ .Values.memory | quote }}",
    "gpus": "{{ .Values.gpus }}",
    "ranks": '{{ ternary .Values.gpus 1 (has "gpu" .Values.with) }}',
    "ranks-text": '{{ ternary .Values.gpus 1 (has "gpu" .Values.with) | quote }}',
    "queue": "{{ .Values.queue }}",
    "storage": "{{ .Values.storage.size | quote }}",
    "args": "{{ toJson .Values.args }}",
}
"""{a mark in the rendering: its text in the template}."""
MARK, QUOTED = re.compile(r"@([a-z-]+)@"), re.compile(r"'([^'\n]*@[a-z-]+@[^'\n]*)'")
CLASS = """\
{{- with .Values.storage.className }}
  storageClassName: {{ . | quote }}
{{- end }}
"""
ENV = """\
{{- range $name, $value := .Values.env }}
%(indent)s- name: {{ $name }}
%(indent)s  value: {{ $value | quote }}
{{- end }}
"""


class Change(NamedTuple):
    """Lines `first` to `end` of the kind's rendering, which a component replaces with `lines`."""

    first: int
    end: int
    lines: tuple[str, ...]


def template(kind: str) -> str:
    """Return the template of a kind. Raises ValueError if two components change lines differently."""
    base, parts = _lines(kind, ()), COMPONENTS
    changes = {part: list(_changes(base, _lines(kind, (part,)))) for part in parts}
    lines: list[str] = []
    place = 0
    while place <= len(base):
        here = {part: each for part in parts for each in changes[part] if each.first == place}
        added = {part: each for part, each in here.items() if each.end == place}
        for part, change in added.items():
            lines += [f'{{{{- if has "{part}" .Values.with }}}}', *change.lines, "{{- end }}"]
        changed = {part: each for part, each in here.items() if each.end > place}
        ends = {each.end for each in changed.values()}
        if len(ends) > 1 or any(place < c.first < max(ends, default=0) for p in parts for c in changes[p]):
            raise ValueError(f"{kind}: {', '.join(changed)} change lines from {base[place]!r} on")
        for number, (part, change) in enumerate(changed.items()):
            word = "else if" if number else "if"
            lines += [f'{{{{- {word} has "{part}" .Values.with }}}}', *change.lines]
        if changed:
            (end,) = ends
            lines += ["{{- else }}", *base[place:end], "{{- end }}"]
            place = end
            continue
        lines += base[place : place + 1]
        place += 1
    return "\n".join(lines) + "\n"

ANNOTATIONS = {
    # `helm uninstall` would delete the claim, and with it every checkpoint.
    "PersistentVolumeClaim": {"helm.sh/resource-policy": "keep"},
    # Helm sorts kinds that it does not know by name: a TrainJob would come before its runtime and be refused.
    "TrainingRuntime": {"helm.sh/hook": "pre-install", "helm.sh/hook-delete-policy": "before-hook-creation"},
}
"""{kind: annotations that only the chart has}."""


def files() -> dict[str, str]:
    """Return {generated file below k8s/chart: its text}."""
    chosen = "".join(
        f'{{{{- {"else " * bool(number)}if eq .Values.kind "{kind}" }}}}\n{_filled(template(kind))}'
        for number, kind in enumerate(KINDS)
    )
    about = (ROOT / "chart" / "Chart.yaml").read_text(encoding="utf-8")
    about = re.sub(r"^(version|appVersion): .*$", rf'\1: "{__version__}"', about, flags=re.M)
    return {"Chart.yaml": about, "templates/job.yaml": f"{NOTICE}{_refusals()}{chosen}{{{{- end }}}}\n"}


def _refusals() -> str:
    lines = [
        (f'and (has "{part}" .Values.with) (not (has "{needed}" .Values.with))', f"{part} needs {needed}")
        for part, needed in NEEDS.items()
    ]
    refusal = '{{- if %s }}{{ fail "with: %s" }}{{- end }}\n'
    return "".join(refusal % line for line in lines)


def _filled(text: str) -> str:
    """Replace the marks with values; a value of several lines replaces the whole line."""
    text = re.sub(r"^( *)- '@env@'\n", lambda found: ENV % {"indent": found[1]}, text, flags=re.M)
    text = re.sub(r"^ *'?@class@'?: .*\n", CLASS, text, flags=re.M)
    return MARK.sub(lambda found: VALUES[found[1]], QUOTED.sub(r"\1", text))  # YAML quotes a leading @


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[Change]:
    for kind, first, end, start, stop in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if kind != "equal":
            yield Change(first, end, tuple(new[start:stop]))


def _lines(kind: str, parts: Sequence[str]) -> list[str]:
    documents = [_annotated(_marked(each, ())) for each in load(render_parts(kind, parts))]
    dumped = (yaml.safe_dump(each, sort_keys=True, width=1000) for each in documents)
    return "---\n".join(dumped).splitlines()


def _annotated(document: Document) -> Document:
    """Add what Helm has to know: that it keeps the volume with the checkpoints, and what it creates first."""
    if more := ANNOTATIONS.get(document["kind"]):
        metadata = document["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), **more}
    return document


def _marked(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        found = {key: _marked(each, (*path, str(key))) for key, each in value.items()}
        return _more(found, path)
    if isinstance(value, list):
        names = (each.get("name", "*") if isinstance(each, dict) else "*" for each in value)
        return [_marked(each, (*path, name)) for name, each in zip(names, value, strict=True)]
    return _scalar(value, path)


def _more(found: Document, path: tuple[str, ...]) -> Document:
    """Add places for the user's values: arguments, variables, the volume's class."""
    if path[-2:-1] == ("containers",) and "command" in found:
        found["args"] = "@args@"
        found["env"] = [*found.get("env", []), "@env@"]
    if found.get("accessModes") and path == ("spec",):
        found["@class@"] = ""
    return found


def _scalar(value: object, path: tuple[str, ...]) -> object:
    key = path[-1]
    if key in ("cpu", "memory") and path[-2] in ("limits", "requests"):
        return f"@{key}@"
    if key in ("nprocPerNode", "numProcPerNode"):
        return "@ranks-text@" if isinstance(value, str) else "@ranks@"
    if key == "nvidia.com/gpu":
        return "@gpus@"
    if key == "storage":
        return "@storage@"
    if key == "image":
        return "@image@"
    if key == "kueue.x-k8s.io/queue-name":
        return "@queue@"
    if key == "app.kubernetes.io/managed-by":
        return "@managed@"
    made = marked(path, str(value))
    if made == str(value):
        return value
    return "@nodes-text@" if made == NODES and isinstance(value, str) else made
