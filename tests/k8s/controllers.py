"""What keeps a job's pods in the simulated cluster: the training operator, and Kubernetes' Job and JobSet."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from simulated_cluster import Cluster, Pod

from patience import patient
from tandem_k8s.contract import PodPlan
from tandem_k8s.documents import Document
from tandem_k8s.rules import action_for


@dataclass
class Controller:
    """Keeps a job's pods as its controller does, by the exit codes alone; `states` is what it reported,
    `deleted` the pods that were deleted while they ran."""

    cluster: Cluster
    documents: list[Document]
    plans: list[PodPlan]
    states: list[str] = field(default_factory=list)
    codes: list[tuple[str, int]] = field(default_factory=list)
    current: dict[str, Pod] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)
    deleted: list[str] = field(default_factory=list)

    def start(self) -> None:
        for plan in self.plans:
            self.current[plan.name] = self.cluster.start(plan)

    def run(self, limit_seconds: float, each_round: Callable[[], None] = lambda: None) -> str:
        """Until the job has ended: Succeeded or Failed. Fails the test after `limit_seconds`."""
        deadline = time.monotonic() + patient(limit_seconds)
        while True:
            each_round()
            state = self.look()
            if state in ("Succeeded", "Failed"):
                return state
            assert time.monotonic() < deadline, f"the job did not end; {self.codes}\n{self.logs()}"
            time.sleep(0.05)

    def look(self) -> str:
        """One reconciliation: pods that ended are judged, and made anew where the controller would."""
        decision = decide(self.documents)
        for name, pod in list(self.current.items()):
            code = pod.code
            if code is None or name in self.succeeded:
                continue
            self.codes.append((name, code))
            action = decision(pod.plan, code)
            if action == "done":
                self.succeeded.add(name)
            elif action == "Failed":
                return self._end("Failed")
            elif action == "gang":
                return self._gang()
            else:
                self._report("Restarting")
                self.cluster.forget(pod.plan)
                self.current[name] = self.cluster.start(pod.plan)
        if not self._complete():
            return self._report("Running")
        return self._end("Succeeded")

    def _end(self, state: str) -> str:
        """The pods that still run are deleted: cleanPodPolicy Running, and what a Job always does."""
        (policy,) = {
            document["spec"]["runPolicy"]["cleanPodPolicy"]
            for document in self.documents
            if document["kind"] == "PyTorchJob"
        } or {"Running"}
        assert policy == "Running", policy  # the rules of manifests ask for it
        for name in self.current:
            self.delete(name)
        return self._report(state)

    def delete(self, name: str) -> None:
        """A pod that still runs gets SIGTERM; one that has ended stays, with its log."""
        pod = self.current[name]
        with contextlib.suppress(ProcessLookupError):
            if pod.code is None and name not in self.deleted:
                pod.send(signal.SIGTERM)
                self.deleted.append(name)

    def wait_for_all(self) -> None:
        """Until the last pod has ended. Fails the test when one outlives its grace period."""
        for pod in self.current.values():
            grace = pod.plan.template.spec["terminationGracePeriodSeconds"]
            pod.process.wait(timeout=patient(grace))

    def _gang(self) -> str:
        for pod in self.current.values():
            if pod.code is None:
                pod.send(signal.SIGKILL)
                pod.process.wait(timeout=patient(10))
        self.succeeded.clear()
        self.start()
        return self._report("Restarting")

    def _complete(self) -> bool:
        """Master: its success is the job's. elasticPolicy: any worker's (kubeflow/trainer pull request 1752).
        Job: its successPolicy. Otherwise: every pod."""
        by_kind = {document["kind"]: document for document in self.documents}
        needed = {plan.name for plan in self.plans}
        if any(plan.role == "Master" for plan in self.plans):
            needed = {plan.name for plan in self.plans if plan.role == "Master"}
        elif "elasticPolicy" in by_kind.get("PyTorchJob", {}).get("spec", {}):
            return bool(self.succeeded)
        elif "Job" in by_kind and "successPolicy" in by_kind["Job"]["spec"]:
            (rule,) = by_kind["Job"]["spec"]["successPolicy"]["rules"]
            indexes = {int(index) for index in rule["succeededIndexes"].split(",")}
            needed = {plan.name for plan in self.plans if plan.index in indexes}
        return needed <= self.succeeded

    def _report(self, state: str) -> str:
        if not self.states or self.states[-1] != state:
            self.states.append(state)
        return state

    def logs(self) -> str:
        return "\n".join(f"== {pod.log.name}: {pod.code}\n{pod.output()}" for pod in self.cluster.pods)


def decide(documents: Iterable[Document]) -> Callable[[PodPlan, int], str]:
    """(pod, exit code) -> done, anew, gang or Failed, by the rules of the manifest's controller."""
    by_kind = {document["kind"]: document for document in documents}
    if "PyTorchJob" in by_kind:
        return lambda plan, code: "done" if code == 0 else "anew" if code >= 128 else "Failed"
    if "Job" in by_kind:
        spec, counted = by_kind["Job"]["spec"], "anew"  # within backoffLimitPerIndex
    else:
        runtime = by_kind.get("JobSet") or by_kind["TrainingRuntime"]["spec"]["template"]
        spec, counted = runtime["spec"]["replicatedJobs"][0]["template"]["spec"], "gang"
    actions = {"Ignore": "anew", "Count": counted, "FailJob": "Failed"}
    return lambda plan, code: "done" if code == 0 else actions[action_for(spec, code)]
