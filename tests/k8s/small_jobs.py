"""The manifests' jobs on a small task, and runs of them in a simulated cluster."""

import copy
import json
import time
from collections.abc import Callable
from typing import Any

from controllers import Controller
from simulated_cluster import Cluster

from patience import patient
from tandem.kubernetes.render import render
from tandem_k8s.contract import plan
from tandem_k8s.documents import ROOT, Document, find, load, pod_templates, read

RUN_SECONDS = 150.0
SMALL = {
    "TANDEM_TASK": "/task/small.py:Small", "TANDEM_BATCH_SIZE": "24", "TANDEM_THREADS": "1",
    "TANDEM_METRICS_LINGER": "0", "TANDEM_LOG_EVERY": "5", "TANDEM_MAX_RESTARTS": "20",
}  # fmt: skip


def manifest(name: str, variables: dict[str, str], nproc: int = 1) -> list[Document]:
    """The manifest or overlay with these variables set in its containers, as a user would edit it."""
    path = ROOT / f"{name}.yaml"
    documents = copy.deepcopy(read(path) if path.is_file() else load(render(name)))
    if nproc != 1:
        find(documents, "PyTorchJob")["spec"]["nprocPerNode"] = str(nproc)
    for document in documents:
        for each in pod_templates(document):
            entries = [one for one in each.container()["env"] if one["name"] not in variables]
            each.container()["env"] = [*entries, *({"name": k, "value": v} for k, v in variables.items())]
    return documents


def ten_lines() -> str:
    """The TrainJob of docs/kubernetes.md, which needs the manifest cluster-runtime."""
    page = (ROOT.parent / "docs" / "kubernetes.md").read_text()
    text = next(block for block in page.split("```") if "kind: TrainJob" in block)
    return text.removeprefix("yaml\n")


class Run:
    """One job in a cluster, and what it left on its volume."""

    def __init__(self, cluster: Cluster, name: str, nproc: int = 1, **variables: str) -> None:
        documents = manifest(name, {**SMALL, **variables}, nproc)
        self.cluster = cluster
        self.controller = Controller(cluster, documents, plan(documents))
        self.folder = cluster.folder / "checkpoints/tandem"

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def steps_saved(self) -> list[int]:
        return sorted(
            int(path.parent.name[5:]) for path in self.folder.glob("checkpoints/step-*/manifest.json")
        )

    def step_logged(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)

    def finish(self) -> dict[str, Any]:
        """Run to the end, which has to be a good one; the summary."""
        state = self.controller.run(RUN_SECONDS)
        assert state == "Succeeded", self.controller.logs()
        self.controller.wait_for_all()
        summary = self.summary()
        assert summary["state"] == "finished" and summary["exit_code"] == 0
        return summary

    def until(self, condition: Callable[[], bool], what: str, limit: float = 100.0) -> None:
        """Reconcile until the condition holds; fails the test with the pods' logs after `limit` seconds."""
        deadline = time.monotonic() + patient(limit)
        while not condition():
            state = self.controller.look()
            assert state not in ("Failed", "Succeeded"), f"{state} before {what}\n{self.controller.logs()}"
            assert time.monotonic() < deadline, f"no {what} in {limit:g} s\n{self.controller.logs()}"
            time.sleep(0.05)
