"""Which documents `OVERLAY=` stands for, rendered by `kubectl kustomize`. Standard library only."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT_OPERATOR = ("indexed-job", "jobset", "trainjob")
BASE = "pytorchjob"
DEFAULT_IMAGE = "tandem"
RENDER_SECONDS = 60
# Components patch what earlier ones have put there: `elastic` comes last, as it takes the master away.
ORDER = ("cpu", "gpu", "rdma", "kueue", "script", "monitoring", "elastic")
NEEDS = {"rdma": "gpu"}
CONTRADICTIONS = (("cpu", "gpu"), ("cpu", "rdma"))
GET_KUBECTL = "on Debian: sudo apt-get install kubernetes-client; elsewhere: kubernetes.io/docs/tasks/tools"


class UsageError(Exception):
    """What was asked for cannot be; one line that says what to type next."""


def components() -> list[str]:
    return sorted(path.name for path in (ROOT / "components").iterdir() if path.is_dir())


def render(selection: str, image: str = "") -> str:
    """The YAML of `selection`: pytorchjob, components of it (`gpu`, or several in any order: `gpu,kueue`),
    indexed-job, jobset or trainjob; with `image` (NAME[:TAG][@DIGEST]) in place of tandem:cuda.

    Raises UsageError with one line.
    """
    parts = parts_of(selection)
    if len(parts) == 1 and not image and (ROOT / "overlays" / parts[0]).is_dir():
        return kustomize(ROOT / "overlays" / parts[0])
    with tempfile.TemporaryDirectory(prefix="tandem-k8s-") as name:
        folder = Path(name).resolve()
        lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization"]
        lines += _sources(parts, folder)
        lines += _image(image, "trainjob" in parts) if image else []
        (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return kustomize(folder)


def parts_of(selection: str) -> list[str]:
    """The parts of `selection` and what they need, each once, in an order that works. Raises UsageError."""
    parts = {part.strip() for part in selection.split(",") if part.strip()}
    if len(parts) == 1 and parts <= {BASE, *WITHOUT_OPERATOR}:
        return list(parts)
    known, manifests = components(), sorted(parts & set(WITHOUT_OPERATOR))
    if manifests:
        others = ", ".join(sorted(parts - set(manifests))) or "another manifest"
        raise UsageError(
            f"OVERLAY={selection!r}: {manifests[0]} does not go with {others}; components are for {BASE} "
            "alone, give one manifest or only components: make k8s-render OVERLAY=gpu,kueue"
        )
    parts.discard(BASE)
    if not parts or parts - set(known):
        wrong = ", ".join(sorted(parts - set(known))) or "nothing"
        raise UsageError(
            f"OVERLAY={selection!r}: {wrong} is unknown; expected {', '.join((BASE, *WITHOUT_OPERATOR))}, or "
            f"one or more of {', '.join(known)}: make k8s-render OVERLAY=gpu,kueue"
        )
    for one, other in CONTRADICTIONS:
        if {one, other} <= parts:
            raise UsageError(f"OVERLAY={selection!r}: {one} contradicts {other}; leave one of them out")
    parts |= {NEEDS[part] for part in parts if part in NEEDS}
    return sorted(parts, key=ORDER.index)


def _sources(parts: Sequence[str], folder: Path) -> list[str]:
    """The kustomization's resources and components, as its lines; plain manifests are copied beside it."""
    if len(parts) == 1 and parts[0] in (BASE, *WITHOUT_OPERATOR):
        shutil.copyfile(ROOT / f"{parts[0]}.yaml", folder / f"{parts[0]}.yaml")
        return [f"resources: [{parts[0]}.yaml]"]
    lines = [f"resources: [{os.path.relpath(ROOT / 'base', folder)}]", "components:"]
    return [*lines, *(f"- {os.path.relpath(ROOT / 'components' / part, folder)}" for part in parts)]


def _image(image: str, trainjob: bool) -> list[str]:
    match = re.fullmatch(r"([^\s@]+?)(?::([\w][\w.-]{0,127}))?(?:@(sha256:[0-9a-f]{64}))?", image)
    if match is None:
        raise UsageError(f"IMAGE={image!r} is not an image; give NAME[:TAG][@sha256:DIGEST]")
    lines = ["images:", f"- name: {DEFAULT_IMAGE}", f'  newName: "{match[1]}"']
    lines += [f'  newTag: "{match[2]}"'] if match[2] else []
    lines += [f'  digest: "{match[3]}"'] if match[3] else []
    if trainjob:  # kustomize knows containers, not a TrainJob's trainer
        patch = f'- {{op: replace, path: /spec/trainer/image, value: "{image}"}}'
        lines += ["patches:", "- target: {kind: TrainJob}", "  patch: |-", f"    {patch}"]
    return lines


def kustomize(folder: Path) -> str:
    """`kubectl kustomize FOLDER`; it needs no cluster. Raises UsageError."""
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=RENDER_SECONDS
        )
    except FileNotFoundError:
        raise UsageError(f"kubectl is not installed; {GET_KUBECTL}") from None
    if done.returncode != 0:
        raise UsageError(f"kubectl kustomize {folder}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def kinds(text: str) -> list[str]:
    """The kinds of the documents of a rendered text, each once, in order."""
    return list(dict.fromkeys(re.findall(r"^kind: (\w+)$", text, re.MULTILINE)))
