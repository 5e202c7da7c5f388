"""Generate files from other files: the owner's name, the version, the components' replacements, the
ClusterTrainingRuntime, the PrometheusRule, and the golden renderings."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from tandem import __version__
from tandem.kubernetes.render import render
from tandem_k8s import chart
from tandem_k8s.components import generated_replacements
from tandem_k8s.documents import OVERLAYS, ROOT, Document, find, job_specs, read

RULES = ROOT.parent / "monitoring" / "rules.yaml"
COMPONENT = ROOT / "components" / "monitoring"
GOLDEN = ROOT.parent / "tests" / "k8s" / "golden"
NOTICE = "# Generated from monitoring/rules.yaml by `make k8s-generate`; edit it there.\n"
LABELS = {
    "app.kubernetes.io/name": "tandem",
    "app.kubernetes.io/instance": "tandem",
    "app.kubernetes.io/component": "monitoring",
    "app.kubernetes.io/part-of": "tandem",
    "app.kubernetes.io/version": __version__,
    "app.kubernetes.io/managed-by": "tandem",
    "release": "kube-prometheus-stack",
}
CLUSTER_RUNTIME = ROOT / "kinds" / "cluster-runtime" / "cluster-runtime.yaml"
TRAINJOB = ROOT / "kinds" / "trainjob" / "trainjob.yaml"
GOLDENS = (*OVERLAYS, "indexed-job,gpu", "jobset,gpu", "trainjob,gpu", "cluster-runtime,gpu")


_VERSION = re.compile(r"^( *app\.kubernetes\.io/version: ).*$", re.M)
_FROM_PODS = "# Generated from pod.yaml by `make k8s-generate`; edit it there.\n"
_FROM_TRAINJOB = (
    "# Generated from ../trainjob/trainjob.yaml by `make k8s-generate`; edit it there.\n"
    "# With it in the cluster, a TrainJob has ten lines: docs/kubernetes.md.\n"
)
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
_OWNED = re.compile(r"(github\.com/|--repo |uses: )[A-Za-z0-9-]+(/tandem\b)")


class _Dumper(yaml.SafeDumper):
    """Block style for multi-line text, lists indented below their key, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def owner() -> str:
    """Return the owner of the repository in pyproject.toml. Raises ValueError if there is none."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    match = re.fullmatch(r"https://github\.com/([A-Za-z0-9-]+)/tandem", repository)
    if match is None:
        raise ValueError(f"pyproject.toml: Repository is {repository!r}; give its GitHub address, .../tandem")
    return match[1]


def owned() -> dict[Path, str]:
    """Return {tracked file with the repository's address: its text with the owner's name}."""
    search = ["git", "grep", "-lIP", _OWNED.pattern]
    listed = subprocess.check_output(search, cwd=ROOT.parent, text=True).splitlines()
    texts = {ROOT.parent / name: (ROOT.parent / name).read_text(encoding="utf-8") for name in listed}
    return {path: _OWNED.sub(rf"\g<1>{owner()}\2", text) for path, text in texts.items()}


def prometheus_rule(rules: str) -> str:
    """Return a PrometheusRule (monitoring.coreos.com/v1) with the groups of a Prometheus rule file."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem", "labels": LABELS},
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    return _dump(NOTICE, document)


def golden(selection: str) -> str:
    """Return a rendering, with the dashboard's file name instead of its 3,700 lines."""
    return re.sub(r"^(  tandem\.json: )\|\n(    .*\n)+", r"\1dashboard.json\n", render(selection), flags=re.M)


def golden_path(selection: str) -> Path:
    return GOLDEN / f"{selection.replace(',', '-')}.yaml"


def cluster_runtime() -> Document:
    """Return the ClusterTrainingRuntime for trainjob.yaml's runtime; runs are named after TrainJobs."""
    runtime = find(read(TRAINJOB), "TrainingRuntime")
    runtime["kind"] = "ClusterTrainingRuntime"
    ((_, spec),) = job_specs(runtime)
    del runtime["metadata"]["labels"]["app.kubernetes.io/instance"]
    del spec["template"]["metadata"]["labels"]["app.kubernetes.io/instance"]
    pod = spec["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    spread["labelSelector"] = {"matchLabels": {"app.kubernetes.io/name": "tandem"}}
    spread["matchLabelKeys"] = [JOBSET_NAME]  # only the pods of the same job count
    (container,) = pod["containers"]
    field = {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET_NAME}']"}}
    (run_dir,) = [each for each in container["env"] if each["name"] == "TANDEM_RUN_DIR"]
    run_dir["value"] = "/checkpoints/$(JOB_NAME)"
    container["env"].insert(0, {"name": "JOB_NAME", "valueFrom": field})
    return runtime


def versioned() -> dict[Path, str]:
    """Return {file with the label app.kubernetes.io/version: its text with this version}; none generated."""
    paths = [path for path in ROOT.rglob("*.yaml") if not path.is_symlink()]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    texts = {path: text for path, text in texts.items() if "Generated from" not in text[:40]}
    made = {path: _VERSION.sub(rf'\g<1>"{__version__}"', text) for path, text in texts.items()}
    return {path: text for path, text in made.items() if _VERSION.search(text)}


def generated() -> dict[Path, str]:
    """Return {generated file: its text}, except the golden renderings."""
    dumped = {path: _dump(_FROM_PODS, content) for path, content in generated_replacements().items()}
    return {
        COMPONENT / "prometheusrule.yaml": prometheus_rule(RULES.read_text(encoding="utf-8")),
        CLUSTER_RUNTIME: _dump(_FROM_TRAINJOB, cluster_runtime()),
        **dumped,
        **{chart.CHART / name: text for name, text in chart.files().items()},
    }


def _dump(notice: str, content: object) -> str:
    return notice + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def write() -> list[Path]:
    """Write the owner's name, the version, all generated files, then the golden renderings."""
    for texts in (owned, versioned, generated):
        for target, text in texts().items():
            target.write_text(text, encoding="utf-8")
    renderings = {golden_path(selection): golden(selection) for selection in GOLDENS}
    for target, text in renderings.items():
        target.write_text(text, encoding="utf-8")
    return [*generated(), *renderings]
