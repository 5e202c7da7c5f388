"""The monitoring component's files, made from the one set of rules and the one dashboard in monitoring/."""

import json
from pathlib import Path

import yaml

from tandem_k8s.documents import OVERLAYS, ROOT
from tandem_k8s.render import render

MONITORING = ROOT.parent / "monitoring"
COMPONENT = ROOT / "components" / "monitoring"
GOLDEN = ROOT.parent / "tests" / "k8s" / "golden"
RULES, DASHBOARD = MONITORING / "rules.yaml", MONITORING / "dashboard.json"
NOTICE = "# Made from {source} by `make k8s-generate`; edit it there.\n"
LABELS = {
    "app.kubernetes.io/name": "tandem",
    "app.kubernetes.io/instance": "tandem",
    "app.kubernetes.io/component": "monitoring",
    "app.kubernetes.io/part-of": "tandem",
}


class _Text(str):
    """Text that stays in block style, line by line, as it was written."""


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)
_Dumper.add_representer(_Text, _represent)


def prometheus_rule(rules: str) -> str:
    """The PrometheusRule (monitoring.coreos.com/v1) around the text of a Prometheus rule file."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem", "labels": LABELS},
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    return NOTICE.format(source="monitoring/rules.yaml") + _dump(document)


def dashboard(text: str) -> str:
    """The ConfigMap that Grafana's sidecar loads (label grafana_dashboard)."""
    document = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "tandem-dashboard", "labels": {**LABELS, "grafana_dashboard": "1"}},
        "data": {"tandem.json": _Text(json.dumps(json.loads(text), indent=1) + "\n")},
    }
    return NOTICE.format(source="monitoring/dashboard.json") + _dump(document)


def _dump(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


KUSTOMIZATION = """\
# For clusters with the Prometheus operator and a Grafana whose sidecar loads labelled ConfigMaps.
# This file and all but podmonitor.yaml are made from monitoring/ by `make k8s-generate`.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
resources:
"""


def generated() -> dict[Path, str]:
    """{file of the component: its text}, from those sources that are there."""
    files = {}
    if RULES.is_file():
        files[COMPONENT / "prometheusrule.yaml"] = prometheus_rule(RULES.read_text(encoding="utf-8"))
    if DASHBOARD.is_file():
        files[COMPONENT / "dashboard.yaml"] = dashboard(DASHBOARD.read_text(encoding="utf-8"))
    names = ["podmonitor.yaml", *(path.name for path in files)]
    files[COMPONENT / "kustomization.yaml"] = KUSTOMIZATION + "".join(f"  - {name}\n" for name in names)
    return files


def write() -> list[Path]:
    """Write the component's files, then the golden renderings of all overlays."""
    for target, text in generated().items():
        target.write_text(text, encoding="utf-8")
    golden = {GOLDEN / f"{name}.yaml": render(name) for name in OVERLAYS}
    for target, text in golden.items():
        target.write_text(text, encoding="utf-8")
    return [*generated(), *golden]
