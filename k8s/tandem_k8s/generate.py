"""What is made from other files: the owner's name, the PrometheusRule, and the golden renderings."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from tandem_k8s.documents import OVERLAYS, ROOT
from tandem_k8s.render import render

RULES = ROOT.parent / "monitoring" / "rules.yaml"
COMPONENT = ROOT / "components" / "monitoring"
GOLDEN = ROOT.parent / "tests" / "k8s" / "golden"
NOTICE = "# Made from monitoring/rules.yaml by `make k8s-generate`; edit it there.\n"
LABELS = {
    "app.kubernetes.io/name": "tandem",
    "app.kubernetes.io/instance": "tandem",
    "app.kubernetes.io/component": "monitoring",
    "app.kubernetes.io/part-of": "tandem",
}


_OWNED = re.compile(r"(github\.com/|--repo )[A-Za-z0-9-]+(/tandem\b)")


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def owner() -> str:
    """The owner of the repository that pyproject.toml names. Raises ValueError if it names none."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    match = re.fullmatch(r"https://github\.com/([A-Za-z0-9-]+)/tandem", repository)
    if match is None:
        raise ValueError(f"pyproject.toml: Repository is {repository!r}; give its GitHub address, .../tandem")
    return match[1]


def owned() -> dict[Path, str]:
    """{tracked file that names the repository: its text with the owner's name}."""
    search = ["git", "grep", "-lIP", _OWNED.pattern]
    listed = subprocess.check_output(search, cwd=ROOT.parent, text=True).splitlines()
    texts = {ROOT.parent / name: (ROOT.parent / name).read_text(encoding="utf-8") for name in listed}
    return {path: _OWNED.sub(rf"\g<1>{owner()}\2", text) for path, text in texts.items()}


def prometheus_rule(rules: str) -> str:
    """The PrometheusRule (monitoring.coreos.com/v1) around the text of a Prometheus rule file."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem", "labels": LABELS},
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    return NOTICE + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def golden(overlay: str) -> str:
    """An overlay's rendering, with the dashboard's name in place of its 3,700 lines."""
    return re.sub(r"^(  tandem\.json: )\|\n(    .*\n)+", r"\1dashboard.json\n", render(overlay), flags=re.M)


def generated() -> dict[Path, str]:
    """{file of the monitoring component: its text}."""
    return {COMPONENT / "prometheusrule.yaml": prometheus_rule(RULES.read_text(encoding="utf-8"))}


def write() -> list[Path]:
    """Write the owner's name, the component's files, then the golden renderings of all overlays."""
    for target, text in owned().items():
        target.write_text(text, encoding="utf-8")
    for target, text in generated().items():
        target.write_text(text, encoding="utf-8")
    renderings = {GOLDEN / f"{name}.yaml": golden(name) for name in OVERLAYS}
    for target, text in renderings.items():
        target.write_text(text, encoding="utf-8")
    return [*generated(), *renderings]
