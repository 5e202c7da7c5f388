"""`tandem init DIR`: the files of a project around a task of one's own. Standard library only."""

import os
import re
from importlib.resources import files
from pathlib import Path

from tandem.errors import ConfigError
from tandem.kubernetes.render import ALIASES, FOLDERS, manifests

FILES = {
    "task.py": "task.py",
    "test_task.py": "test_task.py",
    ".env.example": "env.example",
    "Dockerfile": "Dockerfile",
    "compose.override.yaml": "compose.override.yaml",
    "k8s/kustomization.yaml": "kustomization.yaml",
}
"""{what is written: its template in `project/`}."""
NO_CHECKOUT = "PATH-OF-TANDEM"
"""Stands for the folder of a checkout, whose Compose file the project builds on, where there is none."""
CHILD = "/spec/replicatedJobs/0/template/spec/template/spec"
PODS = {
    "pytorchjob": (
        "PyTorchJob",
        [f"/spec/pytorchReplicaSpecs/{role}/template/spec" for role in ("Master", "Worker")],
    ),
    "trainjob": ("TrainingRuntime", [f"/spec/template{CHILD}"]),
    "jobset": ("JobSet", [CHILD]),
    "job": ("Job", ["/spec/template/spec"]),
}
"""{choice of --kubernetes: (the kind that has the pods, where)}."""
SET_TASK = """\
      - op: add
        path: {pod}/containers/0/env/-
        value: {{name: TANDEM_TASK, value: "/app/task.py:MyTask"}}"""


def init(folder: Path, kind: str = "pytorchjob") -> str:
    """Write the project, and say what comes next. Raises ConfigError for files that are there already."""
    there = [name for name in FILES if os.path.lexists(folder / name)]  # also a link that leads nowhere
    if there:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already; choose another directory: tandem init DIR"
        )
    if linked := [each for each in _folders() if (folder / each).is_symlink()]:
        raise ConfigError(
            f"{folder}/{linked[0]} is a symbolic link; choose another directory: tandem init DIR"
        )
    name = name_of(folder)
    for target, text in texts(folder, checkout(), kind).items():
        path = folder / target
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another directory") from error
    steps = (
        (f"cd {folder}", ""),
        ("tandem check task.py", "validate the task"),
        ("pytest", "test that it saves and resumes (pip install pytest)"),
        ("tandem launch --nodes 2 --task task.py:MyTask", ""),
        (f"docker build -t {name} .", "builds on tandem:cuda, from `make image` in the checkout"),
    )
    lines = [f"{folder}: {', '.join(FILES)}", "next:"]
    lines += [f"  {command:<47} {'# ' * bool(why)}{why}".rstrip() for command, why in steps]
    if checkout() is None:
        lines.append(f"in compose.override.yaml: put the path of a tandem checkout for {NO_CHECKOUT}")
    return "\n".join(lines)


def _folders() -> list[str]:
    """Those below the project's own that files go into."""
    return [parent for name in FILES if (parent := os.path.dirname(name))]


def texts(folder: Path, source: Path | None, kind: str = "pytorchjob") -> dict[str, str]:
    """{file: its text} of a project in `folder` that builds on the checkout `source`, with a job of `kind`.

    Without a checkout, the manifests are those of the installed package.
    """
    document, pods = PODS[kind]
    k8s = manifests() if source is None else source / "k8s"
    values = {
        "@NAME@": name_of(folder),
        "@CHECKOUT@": NO_CHECKOUT if source is None else os.path.relpath(source, folder.resolve()),
        "@K8S@": os.path.relpath(k8s, (folder / "k8s").resolve()),
        "@FOLDER@": FOLDERS[ALIASES.get(kind, kind)],
        "@KIND@": document,
        "@TASK@": "\n".join(SET_TASK.format(pod=pod) for pod in pods),
    }
    found = {}
    for target, template in FILES.items():
        text = (files("tandem.tasks") / "project" / f"{template}.txt").read_text()
        for key, value in values.items():
            text = text.replace(key, value)
        found[target] = text
    return found


def name_of(folder: Path) -> str:
    """The folder's name as an image and a run may be called: lower case, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return name or "project"


def checkout() -> Path | None:
    """The checkout that this tandem runs from, with Compose file and manifests; None where there is none."""
    root = Path(__file__).parents[3]
    return root if (root / "k8s" / "base" / "kustomization.yaml").is_file() else None
