"""`tandem init DIR`: create a project for a new task. Uses only the standard library."""

import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tandem import __version__, shipped
from tandem.errors import ConfigError
from tandem.kubernetes.parameters import substituted
from tandem.kubernetes.render import ALIASES, FOLDERS, manifests

FILES = {
    "task.py": "task.py",
    "test_task.py": "test_task.py",
    ".env.example": "env.example",
    "Dockerfile": "Dockerfile",
    "compose.override.yaml": "compose.override.yaml",
    "k8s/kustomization.yaml": "kustomization.yaml",
    "k8s/job.yaml": "",
}
"""{file to write: its template in `project/`}; JOB has no template, because it is a renamed manifest."""
JOB = "k8s/job.yaml"
SLURM = "train.sbatch"
"""The batch script that `--slurm` adds: tandem's own, which works for any task."""
COMPOSE = ("Dockerfile", "compose.override.yaml")
KUBERNETES = ("Dockerfile", "k8s/kustomization.yaml", JOB)
BASIC = tuple(name for name in FILES if name not in (*COMPOSE, *KUBERNETES))
NO_CHECKOUT = "PATH-OF-TANDEM"
"""Placeholder for the checkout that a project's Compose file builds on, if there is none."""
JOBS = {"pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "jobset": "JobSet", "job": "Job"}
"""{choice of --kubernetes: the kind of the job's manifest}."""
JOB_HEADER = """\
# The {document} of {name} and its other objects, from tandem {version}. tandem's docs/kubernetes.md
# describes each field. kustomization.yaml adds the image, which has the task.
# To write this file again with another number of nodes or with components (gpu, kueue, monitoring...):
#
#   tandem k8s render --kind {kind} --name {name} --nodes 3 --with gpu >k8s/job.yaml
"""


def chosen(compose: bool = False, slurm: bool = False) -> tuple[str, ...]:
    """Return the files of a project. Without `compose`: all except the batch script, which `slurm` adds."""
    names = (*BASIC, *COMPOSE) if compose else tuple(FILES)
    return (*names, SLURM) if slurm else names


def init(folder: Path, names: Sequence[str] = tuple(FILES), kind: str = "pytorchjob") -> str:
    """Write the project; return the next steps. Raises ConfigError for files that already exist."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; choose another directory: tandem init DIR")
    # Lexists also finds a broken symbolic link.
    there = [name for name in names if os.path.lexists(folder / name)]
    if there:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already; choose another directory: tandem init DIR"
        )
    # Files behind a link would be written outside the project.
    if linked := [each for each in _folders(names) if (folder / each).is_symlink()]:
        raise ConfigError(
            f"{folder}/{linked[0]} is a symbolic link; choose another directory: tandem init DIR"
        )
    name = name_of(folder)
    for target, text in texts(folder, shipped.checkout(), names, kind).items():
        path = folder / target
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A file that appeared after the check above is not overwritten.
            with path.open("x") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another directory") from error
    steps = [
        (f"cd {folder}", ""),
        ("tandem check task.py", "validate the task"),
        ("pytest", "test that it saves and resumes (pip install pytest)"),
        ("tandem launch --nodes 2 --task task.py:MyTask", ""),
    ]
    if "Dockerfile" in names:
        steps += [(f"docker build -t {name} .", "builds on tandem:cuda, from `make image` in the checkout")]
    if "compose.override.yaml" in names:
        steps += [("tandem cluster up --nodes 2", "the same, and train on two containers")]
    if SLURM in names:
        steps += [(f"sbatch {SLURM} --task task.py:MyTask", "train on two nodes of a Slurm cluster")]
    if JOB in names:
        kind_of = f" --kind {kind}" if kind != "pytorchjob" else ""
        steps += [
            (
                "kubectl apply -k k8s",
                f"start the {JOBS[kind]}; first push the image and set its name in k8s/kustomization.yaml",
            ),
            (f"tandem k8s logs{kind_of} --name {job_name(folder)}", "follow its pods"),
        ]
    width = max(47, *(len(command) for command, _ in steps))
    lines = [f"{folder}: {', '.join(names)}", "next:"]
    lines += [f"  {command:<{width}} {'# ' * bool(why)}{why}".rstrip() for command, why in steps]
    if shipped.checkout() is None and COMPOSE[1] in names:
        lines.append(f"in {COMPOSE[1]}: put the path of a tandem checkout for {NO_CHECKOUT}")
    return "\n".join(lines)


def _folders(names: Sequence[str]) -> list[str]:
    """Return the subdirectories of the project that contain files."""
    return [parent for name in names if (parent := os.path.dirname(name))]


def texts(
    folder: Path, source: Path | None, names: Sequence[str] = tuple(FILES), kind: str = "pytorchjob"
) -> dict[str, str]:
    """Return {file: its text} for a project in `folder` with a job of `kind`.

    Its Compose file builds on the checkout `source`, or on a placeholder without one.
    """
    values = {
        "@NAME@": name_of(folder),
        "@CHECKOUT@": NO_CHECKOUT if source is None else os.path.relpath(source, folder.resolve()),
    }
    found = {}
    for target in names:
        if target == SLURM:
            # The script's usage text has its path in the checkout.
            text = (shipped.root() / "slurm" / SLURM).read_text().replace(f"slurm/{SLURM}", SLURM)
        elif target == JOB:
            text = _job(kind, job_name(folder))
        else:
            text = (files("tandem.tasks") / "project" / f"{FILES[target]}.txt").read_text()
        for key, value in values.items():
            text = text.replace(key, value)
        found[target] = text
    return found


def _job(kind: str, name: str) -> str:
    """Return the manifest of a kind under another name, with a header for the project."""
    file = ALIASES.get(kind, kind)
    text = (manifests() / FOLDERS[file] / f"{file}.yaml").read_text()
    # The manifest's own header refers to files and targets of the checkout.
    body = re.sub(r"\A(#.*\n)+", "", text)
    header = JOB_HEADER.format(document=JOBS[kind], name=name, kind=kind, version=__version__)
    return header + substituted(body, name)


def job_name(folder: Path) -> str:
    """Return the directory's name in a form valid for jobs: a letter first, at most 50 characters."""
    name = name_of(folder)
    # The cut may leave a dash at the end, which Kubernetes rejects.
    return (name if name[0].isalpha() else f"run-{name}")[:50].rstrip("-")


def name_of(folder: Path) -> str:
    """Return the directory's name in a form valid for images and runs: lower case, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return name or "project"
