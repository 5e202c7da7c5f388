"""A small Kubernetes API server: discovery, and objects kept in a dictionary. Enough for real kubectl.

What it does not do: admission, validation, watches (a wait for something that is gone ends at once).
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from patience import patient

CORE = {"namespaces": "Namespace", "pods": "Pod", "persistentvolumeclaims": "PersistentVolumeClaim",
        "services": "Service", "configmaps": "ConfigMap", "events": "Event", "nodes": "Node"}  # fmt: skip
GLOBAL = ("Namespace", "Node")
GROUPS = {
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "batch/v1": {"jobs": "Job"},
}
OPERATOR = {"kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"}}


class ApiServer:
    """`objects` is {path: object}, `logs` {pod: text}; `requests` every (method, path) that came,
    `graces` the seconds that a DELETE gave."""

    def __init__(self, folder: Path, groups: dict[str, dict[str, str]]) -> None:
        self.groups = {**GROUPS, **groups}
        self.objects: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.graces: dict[str, Any] = {}
        self.add("/api/v1/namespaces/default", "v1", "Namespace")
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}], "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(config))

    def add(self, path: str, version: str, kind: str, **metadata: Any) -> dict[str, Any]:
        """Keep an object at this path, and return it; its name is the path's last part."""
        parts = path.split("/")
        named = {"name": parts[-1], "uid": str(len(self.objects)), "resourceVersion": "1", **metadata}
        if "namespaces" in parts[:-2]:
            named["namespace"] = parts[parts.index("namespaces") + 1]
        self.objects[path] = {"apiVersion": version, "kind": kind, "metadata": named}
        return self.objects[path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=patient(10))

    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.objects.values()}


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: the test reads `requests`."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.api.requests.append(("GET", url.path))
        if url.path.endswith("/log"):
            return self._write(200, "text/plain", self.api.logs[url.path.split("/")[-2]].encode())
        found = self._discovery(url.path) or self.api.objects.get(url.path)
        if found is None and url.path.rpartition("/")[2] in self._plurals():
            found = self._list(url.path, parse_qs(url.query).get("labelSelector", [""])[0])
        self._answer(200, found) if found else self._missing(url.path)

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._body()
        self.api.requests.append(("POST", path))
        body.setdefault("metadata", {}).update(uid="1", resourceVersion="1")
        self.api.objects[f"{path}/{body['metadata']['name']}"] = body
        self._answer(201, body)

    def do_DELETE(self) -> None:
        path = urlsplit(self.path).path
        self.api.graces[path] = self._body().get("gracePeriodSeconds")
        self.api.requests.append(("DELETE", path))
        found = self.api.objects.pop(path, None)
        if found is None:
            return self._missing(path)
        details = {"name": found["metadata"]["name"], "uid": found["metadata"]["uid"]}
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "/version":
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/api/v1":
            return _resources("v1", CORE)
        if path == "/apis":
            groups = [_group(each) for each in self.api.groups]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "/openapi/v3":
            versions = ["api/v1", *(f"apis/{each}" for each in self.api.groups)]
            return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in versions}}
        if path.startswith("/openapi/v3/"):
            return _openapi(path.removeprefix("/openapi/v3/"), {**self.api.groups, "v1": CORE})
        version = path.removeprefix("/apis/")
        return _resources(version, self.api.groups[version]) if version in self.api.groups else None

    def _plurals(self) -> set[str]:
        return {*CORE, *(name for group in self.api.groups.values() for name in group)}

    def _list(self, path: str, selector: str) -> dict[str, Any]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        prefix = path + "/"
        items = [
            each
            for name, each in self.api.objects.items()
            if name.startswith(prefix) and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        kind = {**CORE, **{k: v for group in self.api.groups.values() for k, v in group.items()}}
        version = "v1" if path.startswith("/api/") else "/".join(path.split("/")[2:4])
        name = kind[path.rpartition("/")[2]]
        head = {"kind": f"{name}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}}
        return {**head, "items": items}

    def _missing(self, path: str) -> None:
        name = path.rpartition("/")[2]
        self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                           "message": f'"{name}" not found', "code": 404})  # fmt: skip

    def _body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        self._write(code, "application/json", json.dumps(body).encode())

    def _write(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _group(version: str) -> dict[str, Any]:
    name, _, number = version.partition("/")
    one = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [one], "preferredVersion": one}


def _resources(version: str, kinds: dict[str, str]) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    entries = [
        {"name": name, "singularName": kind.lower(), "namespaced": kind not in GLOBAL, "kind": kind}
        for name, kind in kinds.items()
    ]
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
    return {**head, "resources": [{**entry, "verbs": verbs} for entry in entries]}


def _openapi(path: str, groups: dict[str, dict[str, str]]) -> dict[str, Any] | None:
    """That the server validates fields itself: kubectl asks nothing else of it."""
    version = path.removeprefix("apis/").removeprefix("api/")
    if version not in groups:
        return None
    group, _, number = version.rpartition("/")
    paths = {}
    for plural, kind in groups[version].items():
        operation = {
            "operationId": f"patch{kind}",
            "responses": {},
            "parameters": [{"name": "fieldValidation", "in": "query"}],
            "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
        }
        paths[f"/{path}/{plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}
