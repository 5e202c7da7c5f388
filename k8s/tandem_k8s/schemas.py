"""Is every field known, and of the right type? Closed schemas, the operator's client, Kubernetes' own.

The schemas in k8s/schemas are those of the released CRDs with `additionalProperties: false` everywhere: the
API server itself drops unknown fields without a word. Each check returns one line per problem.
"""

import functools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import kubernetes_validate

from tandem_k8s.documents import ROOT, Document, pod_templates, title
from tandem_k8s.values import core_values, expected, matches, of_types, wrong

SCHEMAS = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.v1.9.4",
    "TrainJob": "trainer.kubeflow.org_trainjobs.v2.3.0",
    "JobSet": "jobset.x-k8s.io_jobsets.v0.12.0",
    "PodMonitor": "monitoring.coreos.com_podmonitors.v0.93.0",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.v0.93.0",
}
MAIN = "trainer.kubeflow.org_{}.main-8c0f505"
"""Trainer's CRDs on its main branch on 2026-08-21, after 2.3.0: what 2.4 is made from."""
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
CORE_KINDS = ("PersistentVolumeClaim", "Service", "ConfigMap", "Job", "NetworkPolicy", "Pod")
KUBERNETES_VERSIONS = ("1.31", "1.37")  # the oldest that the manifests are for, and the newest that is known


def closed_schema(document: Document) -> list[str]:
    """Unknown fields, wrong types and values of custom resources; unknown kinds are a problem as well."""
    kind = document.get("kind")
    if kind in CORE_KINDS:
        return []
    if kind not in (*RUNTIMES, *SCHEMAS):
        return [f"{title(document)}: no schema for {document.get('apiVersion')} {kind}"]
    errors = (error for schema in _schemas(kind) for error in _Validator(schema).iter_errors(document))
    return list(dict.fromkeys(f"{title(document)}: {_line(error)}" for error in errors))


def _schemas(kind: str) -> list[dict[str, Any]]:
    """Those of every release that a kind is checked against."""
    if kind == "TrainJob":
        return [_schema(SCHEMAS[kind]), _schema(MAIN.format("trainjobs"))]
    if kind in RUNTIMES:
        newest = _schema(MAIN.format("trainingruntimes"))
        properties = {**newest["properties"], "kind": {"const": kind}}
        return [_training_runtime(kind), {**newest, "properties": properties}]
    return [_schema(SCHEMAS[kind])]


def _pattern(_: object, pattern: str, instance: object, __: object) -> Iterator[jsonschema.ValidationError]:
    """As the API server reads a pattern: in Go's syntax."""
    if isinstance(instance, str) and not matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


_extend: Any = jsonschema.validators.extend  # has no types
_Validator = _extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def core_schema(document: Document) -> list[str]:
    """Kubernetes' own kinds, and every pod template as the Pod that it becomes, strictly."""
    pods = [
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": each.spec}, each.where)
        for each in pod_templates(document)
    ]
    is_own = document.get("kind") in CORE_KINDS
    own = [(document, title(document))] if is_own else []
    found = (
        (where, _refused(json.dumps(each), version))
        for each, where in own + pods
        for version in KUBERNETES_VERSIONS
    )
    lines = [f"{where}: {why}" for where, why in found if why]
    return [*lines, *(core_values(document) if is_own else ())]


@functools.cache  # half a second each, and replicas of one template are the same pod
def _refused(document: str, version: str) -> str:
    """Why this release of Kubernetes takes the document (JSON) not as it is; empty when it does."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except jsonschema.ValidationError as error:
        return f"{_line(error)} (Kubernetes {version})"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return ""


def round_trip(document: Document) -> list[str]:
    """A PyTorchJob read by the operator's Python client and written again has to be the same."""
    if document.get("kind") != "PyTorchJob":
        return []
    from kubeflow.training import ApiClient  # 0.4 s, and only this check needs it

    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    try:
        model = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{title(document)}: kubeflow-training cannot read it: {str(error).splitlines()[0]}"]
    returned = client.sanitize_for_serialization(model)
    return [f"{title(document)}: kubeflow-training {line}" for line in differences(document, returned)]


def differences(given: Any, returned: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, one line each, in order."""
    if isinstance(given, dict) and isinstance(returned, dict):
        lines = []
        for key in [*given, *(key for key in returned if key not in given)]:
            where = f"{path}.{key}" if path else key
            if key not in returned:
                lines.append(f"drops {where}")
            elif key not in given:
                lines.append(f"adds {where}")
            else:
                lines += differences(given[key], returned[key], where)
        return lines
    if isinstance(given, list) and isinstance(returned, list) and len(given) == len(returned):
        return [
            line
            for index, (left, right) in enumerate(zip(given, returned, strict=True))
            for line in differences(left, right, f"{path}[{index}]")
        ]
    if ".resources." in path and str(given) == str(returned):
        return []  # a quantity: 1 and "1" are the same
    return [] if given == returned else [f"changes {path} from {given!r} to {returned!r}"]


@functools.cache
def _schema(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((ROOT / "schemas" / f"{name}.json").read_text(encoding="utf-8")))


@functools.cache
def _training_runtime(kind: str) -> dict[str, Any]:
    """A runtime is a machine-learning policy around a JobSet; only the parts used here, closed as well."""
    jobset = _schema(SCHEMAS["JobSet"])
    metadata = jobset["properties"]["metadata"]
    torch = {"numProcPerNode": {"type": ["integer", "string"]}, "elasticPolicy": {"type": "object"}}
    policy = {"numNodes": {"type": "integer", "minimum": 1}, "torch": _closed(torch)}
    template = _closed({"metadata": metadata, "spec": jobset["properties"]["spec"]}, "spec")
    spec = _closed({"mlPolicy": _closed(policy), "template": template}, "template")
    kinds = {"apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"}, "kind": {"const": kind}}
    return _closed({**kinds, "metadata": metadata, "spec": spec}, "apiVersion", "kind", "metadata", "spec")


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False,
    }  # fmt: skip


def _line(error: jsonschema.ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the document"
    if error.validator == "pattern":
        words = expected(str(error.validator_value), list(error.absolute_path))
        return f"{where}: {wrong(error.instance)}; expected {words}"
    asked: Any = [{"type": error.validator_value}] if error.validator == "type" else error.validator_value
    if error.validator in ("anyOf", "oneOf", "type") and (words := of_types(asked)):
        return f"{where}: {wrong(error.instance)}; expected {words}"
    message = error.message if len(error.message) < 160 else error.message[:157] + "..."
    return f"{where}: {message}"
