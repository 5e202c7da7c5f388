"""Render a kind of job and its components with `kubectl kustomize`, which needs no cluster."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tandem import shipped
from tandem.errors import ConfigError
from tandem.kubernetes.parameters import JOB, mistake, substituted, typed
from tandem.text import did_you_mean, nearest

FOLDERS = {
    "pytorchjob": "base",
    "trainjob": "kinds/trainjob",
    "jobset": "kinds/jobset",
    "indexed-job": "kinds/indexed-job",
    "cluster-runtime": "kinds/cluster-runtime",
}
"""{kind: its directory in the manifests}."""
KIND = "pytorchjob"
"""The default kind of job."""
ALIASES = {"job": "indexed-job"}
ORDER = ("cpu", "gpu", "rdma", "kueue", "script", "monitoring", "network", "elastic")
"""All components in the order of application: `elastic` removes what others have changed."""
NEEDS = {"rdma": "gpu"}
CONTRADICTIONS = (("cpu", "gpu"), ("cpu", "rdma"))
ALLOWED = {"cluster-runtime": ("cpu", "gpu", "rdma")}
"""{kind: its components}, if it does not have all components other than those of ONLY."""
ONLY = {"elastic": "pytorchjob"}
"""{component: the only kind that has it}."""
DEFAULT_IMAGE = "tandem"
RENDER_SECONDS = 60
GET_KUBECTL = "on Debian: sudo apt-get install kubernetes-client; elsewhere: kubernetes.io/docs/tasks/tools"


class UsageError(ConfigError):
    """A selection, image or cluster that cannot be used; a one-line message says what to type next."""


def manifests() -> Path:
    """Return the directory with the manifests: `k8s/` of a checkout, or the installed package's copy."""
    return shipped.root() / "k8s"


def allowed(kind: str) -> tuple[str, ...]:
    """Return the components that a kind supports."""
    return ALLOWED.get(kind) or tuple(name for name in ORDER if ONLY.get(name, kind) == kind)


def render(selection: str, image: str = "", name: str = JOB, nodes: int | None = None) -> str:
    """Return the YAML of `selection`, with `image` (NAME[:TAG][@DIGEST]) instead of tandem:cuda.

    A selection is a kind of job, components of it, or both, in any order: `trainjob,gpu,kueue`. `name` and
    `nodes` replace the name and the number of nodes of the manifests. Raises a one-line UsageError.
    """
    kind, parts = parts_of(selection)
    text = render_parts(kind, parts, image)
    if name == JOB and nodes is None:
        return text
    return substituted(text, name, nodes, has_master=kind == KIND and "elastic" not in parts)


def render_parts(kind: str, parts: Sequence[str], image: str = "") -> str:
    """Return the YAML of a kind with exactly these components in this order, without the ones they need."""
    with tempfile.TemporaryDirectory(prefix="tandem-k8s-") as name:
        # kustomize resolves links before it applies relative paths, and /tmp may be a link.
        folder = Path(name).resolve()
        root = manifests()
        lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization"]
        # kustomize accepts no absolute paths for directories.
        lines += [f"resources: [{os.path.relpath(root / FOLDERS[kind], folder)}]"]
        lines += ["components:"] if parts else []
        lines += [f"- {os.path.relpath(root / 'components' / part, folder)}" for part in parts]
        lines += _image(image) if image else []
        (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return _job_last(kustomize(folder))


def _job_last(text: str) -> str:
    """Move the TrainJob to the end: kustomize puts it before its runtime, and then it is refused."""
    documents = text.removesuffix("\n").split("\n---\n")
    documents.sort(key=lambda each: re.search("^kind: TrainJob$", each, re.MULTILINE) is not None)
    return "\n---\n".join(documents) + "\n"


def parts_of(selection: str) -> tuple[str, list[str]]:
    """Return the kind and the components of `selection`, including required ones, in a valid order.

    Raises UsageError.
    """
    named = dict.fromkeys(part.strip() for part in selection.split(",") if part.strip())
    asked = [ALIASES.get(part, part) for part in named]
    kinds = list(dict.fromkeys(part for part in asked if part in FOLDERS))
    parts = {part for part in asked if part not in FOLDERS}
    message = mistake("--with", selection)
    if len(kinds) > 1:
        raise UsageError(f"{message} {kinds[0]} and {kinds[1]} are two kinds of job; leave one of them out")
    kind = kinds[0] if kinds else KIND
    choices = f"{kind} allows {', '.join(allowed(kind))}"
    if unknown := sorted(parts - set(ORDER)):
        hint = did_you_mean(nearest(unknown[0], (*allowed(kind), *FOLDERS, *ALIASES)), ";")
        raise UsageError(
            f"{message} {', '.join(unknown)} is unknown{hint} {choices}; the kinds are {', '.join(FOLDERS)}"
        )
    if not asked:
        example = typed("render", {"--with": "gpu,kueue"})
        raise UsageError(
            f"{message} it is empty; {choices}; the kinds are {', '.join(FOLDERS)}; for example: {example}"
        )
    for part in sorted(parts):
        if part not in allowed(kind):
            only = f" (only {ONLY[part]} has it)" if part in ONLY else ""
            raise UsageError(f"{message} {kind} has no component {part}{only}; {choices}; leave {part} out")
    for one, other in CONTRADICTIONS:
        if {one, other} <= parts:
            raise UsageError(f"{message} {one} contradicts {other}; leave one of them out")
    parts |= {NEEDS[part] for part in parts if part in NEEDS}
    return kind, sorted(parts, key=ORDER.index)


def selection_of(kind: str, components: Sequence[str]) -> str:
    """Combine `--kind` and `--with` into one selection."""
    return ",".join(part for part in (kind, *components) if part)


def _image(image: str) -> list[str]:
    match = re.fullmatch(r"([^\s@]+?)(?::([\w][\w.-]{0,127}))?(?:@(sha256:[0-9a-f]{64}))?", image)
    if match is None:
        raise UsageError(f"{mistake('--image', image)} expected NAME[:TAG][@sha256:DIGEST]")
    lines = ["images:", f"- name: {DEFAULT_IMAGE}", f'  newName: "{match[1]}"']
    # Quoted, because a tag such as 1.10 is a number in YAML.
    lines += [f'  newTag: "{match[2]}"'] if match[2] else []
    return lines + ([f'  digest: "{match[3]}"'] if match[3] else [])


def kustomize(folder: Path) -> str:
    """Return the output of `kubectl kustomize FOLDER`. Raises UsageError."""
    if shutil.which("kubectl") is None:
        raise UsageError(f"kubectl is not installed; {GET_KUBECTL}")
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=RENDER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"kubectl kustomize {folder}: no answer within {RENDER_SECONDS} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UsageError(f"kubectl kustomize {folder}: {last}")
    return done.stdout


def kinds(text: str) -> list[str]:
    """Return the kinds of documents in a rendered text, each once, in order."""
    return list(dict.fromkeys(re.findall(r"^kind: (\w+)$", text, re.MULTILINE)))
