"""Read a run's state from kubectl's JSON: result, containers, and lost nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUCCEEDED = ("Succeeded", "Complete", "Completed")  # PyTorchJob; Job and TrainJob; JobSet
FAILED = "Failed"
FAILED_CODE = 1
MASTERS = (  # labels of node 0's pod
    {"training.kubeflow.org/replica-type": "master"},
    {"batch.kubernetes.io/job-completion-index": "0"},
)
# With this taint, Kubernetes removes the pods and detaches their volumes (non-graceful node shutdown).
LOST_NODE_TAINT = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: state, the cluster's message, and the corresponding exit code."""

    state: str
    message: str
    code: int

    def __str__(self) -> str:
        return f"{self.state} ({self.code}){f': {self.message}' if self.message else ''}"


def outcome(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobOutcome | None:
    """Return the result of a job; None while it runs.

    A failed job has the exit code of node 0, or else the largest of all pods.
    """
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("status") != "True":
            continue
        if condition["type"] in SUCCEEDED:
            return JobOutcome(condition["type"], "", 0)
        if condition["type"] == FAILED:
            message = condition.get("message") or condition.get("reason") or ""
            return JobOutcome(FAILED, message, failed_code(pods))
    return None


def failed_code(pods: Sequence[Mapping[str, Any]]) -> int:
    """Return the most informative exit code of a failed job; 1 if no container has one."""

    def codes(some: Iterable[Mapping[str, Any]]) -> list[int]:
        return [end["exitCode"] for pod in some for end in _ends(pod) if end["exitCode"]]

    firsts = [pod for pod in pods if any(each.items() <= labels_of(pod).items() for each in MASTERS)]
    # Node 0's code is the job's result. The other nodes may have lost only their peer.
    return max(codes(firsts) or codes(pods) or [FAILED_CODE])


def _ends(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    states = [status.get("state", {}) for status in container_statuses(pod)]
    return [state["terminated"] for state in states if "terminated" in state]


def labels_of(found: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = found["metadata"].get("labels") or {}
    return labels


def container_statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the container statuses, with init containers only while the pod waits for them."""
    status = pod.get("status", {})
    waiting = [each for each in status.get("initContainerStatuses", []) if not _is_over(each)]
    return [*waiting, *status.get("containerStatuses", [])]


def _is_over(status: Mapping[str, Any]) -> bool:
    return bool(status.get("state", {}).get("terminated", {}).get("exitCode") == 0)


def lives(pod: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (container, restart count) for every container of the pod that has started."""
    return [
        (status["name"], int(status.get("restartCount", 0)))
        for status in pod.get("status", {}).get("containerStatuses", [])
        # A container that waits has no log yet.
        if {"running", "terminated"} & set(status.get("state", {}))
    ]


def has_begun(pod: Mapping[str, Any]) -> bool:
    """Return True if a container runs or has run, so that there may be something to save."""
    # A container that waits for a restart has run before.
    return bool(lives(pod) or any(status.get("lastState") for status in container_statuses(pod)))


def container_lines(pod: Mapping[str, Any]) -> list[str]:
    """Return a line per container: its state, or why it ended or waits, with exit code and restarts."""
    name = pod["metadata"]["name"]
    lines = []
    for status in container_statuses(pod):
        state = _state(status.get("state", {}))
        last = status.get("lastState", {}).get("terminated")
        if last:
            state += f"; before: {_state({'terminated': last})}"
        restarts = int(status.get("restartCount", 0))
        if restarts:
            state += f"; {restarts} restart{'s' * (restarts > 1)}"
        lines.append(f"{name}  {status['name']}  {state}")
    if not lines:
        why = [each for each in pod.get("status", {}).get("conditions", []) if each.get("status") == "False"]
        state = why[0].get("message") or why[0].get("reason", "") if why else ""
        lines.append(
            f"{name}  {pod.get('status', {}).get('phase', 'Pending')}{f': {state}' if state else ''}"
        )
    return lines


def _state(state: Mapping[str, Any]) -> str:
    if "terminated" in state:
        end = state["terminated"]
        text = f"ended with {end['exitCode']}"
        reason = end.get("reason", "")
        # Completed and Error add nothing to the exit code.
        return f"{text} ({reason})" if reason not in ("", "Completed", "Error") else text
    if "waiting" in state:
        waiting = state["waiting"]
        message = str(waiting.get("message", "")).split("\n")[0]
        return f"waits: {waiting.get('reason', '')}{f', {message}' if message else ''}"
    return "runs" if "running" in state else "is not known"


def lost_nodes(pods: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return {node that does not answer: its pods of this run}."""
    silent = {
        node["metadata"]["name"]
        for node in nodes
        for condition in node.get("status", {}).get("conditions", [])
        # Unknown means that the kubelet stopped reporting. False is a node that answers, so its pods can
        # end.
        if condition["type"] == "Ready" and condition["status"] == "Unknown"
    }
    found: dict[str, list[str]] = {}
    for pod in pods:
        if (where := pod.get("spec", {}).get("nodeName")) in silent:
            found.setdefault(where, []).append(pod["metadata"]["name"])
    return found


def lost_node_line(node: str, pods: Sequence[str]) -> str:
    return (
        f"node {node} does not answer, and {', '.join(pods)} cannot end there; when it is surely off: "
        f"kubectl taint nodes {node} {LOST_NODE_TAINT}"
    )


def event_lines(events: Sequence[Mapping[str, Any]], names: set[str]) -> list[str]:
    """Return the warnings about objects with these names, newest last."""

    def when(event: Mapping[str, Any]) -> str:
        # Events of the events.k8s.io API have no lastTimestamp.
        made = event["metadata"].get("creationTimestamp")
        return str(event.get("lastTimestamp") or event.get("eventTime") or made or "")

    own = [
        event
        for event in events
        if event.get("type") == "Warning" and event.get("involvedObject", {}).get("name") in names
    ]
    return [
        f"{when(event)}  {event['involvedObject']['name']}  {event.get('reason', '')}: "
        f"{' '.join(str(event.get('message', '')).split())}{_times(event)}"
        # Times in RFC 3339 and UTC sort as text.
        for event in sorted(own, key=when)
    ]


def _times(event: Mapping[str, Any]) -> str:
    count = event.get("count") or 1
    return f" ({count} times)" if count > 1 else ""


def claim_difference(asked: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Return how the manifest would change a claim in a way that Kubernetes rejects; '' if it would not.

    Only growing is allowed, and then the storage class decides.
    """
    wanted = asked.get("spec", {})
    found = there.get("spec", {})
    for name, key in (("access modes", "accessModes"), ("storage class", "storageClassName")):
        # A missing key is filled in by the API server, so it is no difference.
        if key in wanted and wanted[key] != found.get(key, wanted[key]):
            return f"{name} {_words(found[key])}, and the manifest asks for {_words(wanted[key])}"
    sizes = [each.get("resources", {}).get("requests", {}).get("storage", "") for each in (wanted, found)]
    if all(sizes) and _bytes(sizes[0]) < _bytes(sizes[1]):
        return f"{sizes[1]}, and the manifest asks for {sizes[0]}: a claim cannot shrink"
    return ""


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _bytes(quantity: str) -> float:
    """Convert a Kubernetes storage quantity to bytes: 20Gi, 500M, 1e9."""
    number = quantity.rstrip("KMGTPEkmi")
    unit = quantity[len(number) :]
    powers = {"": 1.0, "m": 1e-3, **{letter: 1000.0**n for n, letter in enumerate("kMGTPE", 1)}}
    powers |= {f"{letter}i": 1024.0**n for n, letter in enumerate("KMGTPE", 1)}
    return float(number) * powers[unit]
