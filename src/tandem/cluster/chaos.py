"""Fault injection: one fault in a running cluster, or a table of all faults.

For each fault, `all` starts a new cluster, lets it finish, and compares the SHA-256 of the weights with that
of an uninterrupted run.
"""

import argparse
import contextlib
import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cluster.actions import remove_metrics, start
from tandem.cluster.engine import HERE, Cluster, ClusterError, docker, say
from tandem.cluster.faults import FAULTS, POLL_SECONDS, FaultContext
from tandem.cluster.job import ClusterJob
from tandem.cluster.network import keep_shape
from tandem.cluster.preflight import checked_node
from tandem.cluster.project import DEFAULT_IMAGE

READY_SECONDS = 400.0
OUTCOME_SECONDS = 300.0
OWN_PROJECT = "tandem-chaos"
OWN_RUN = {
    "NODES": "2",
    # Docker chooses a free port, because the user's own cluster may have the usual one.
    "METRICS_PORT": "",
    # The fault `oom` fills all of it.
    "MEMORY": "1536mb",
    "TASKS": str(HERE),
    "TANDEM_TASK": "/tasks/slow_digits.py:SlowDigits",
    "COMMAND": "launch --steps 160 --checkpoint-every 10 --eval-every 160 --threads 1 "
    " --hang-timeout 10 --metrics-linger 0",
}


class OutcomeError(ClusterError):
    """The documented outcome did not occur."""

    exit_code = 1


@dataclass(frozen=True)
class ChaosRow:
    """One row of the table."""

    fault: str
    done: str
    happened: str
    seconds: float
    steps_lost: int

    def __str__(self) -> str:
        cost = f"training again after {self.seconds:.1f} s, {self.steps_lost} steps lost"
        return f"{self.fault}: {self.done}; {self.happened}; {cost}"


def live_step(cluster: Cluster) -> int | None:
    """Return the step on the metrics page; None if node 0 does not answer or does not train."""
    address = docker("port", f"{cluster.project}-metrics-1", "19469", check=False).strip()
    # Node 0 may be down or restarting because of the fault.
    with contextlib.suppress(OSError, ValueError, LookupError):
        with urllib.request.urlopen(f"http://{address.splitlines()[0]}/api/run", timeout=2) as answer:
            run = json.load(answer)
            return int(run["step"]) if run["state"] == "training" else None
    return None


def until(cluster: Cluster, condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Poll until the condition holds; raise OutcomeError if time runs out or the job ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        nodes = cluster.nodes()
        if not any(node.is_unfinished for node in nodes):
            codes = [node.exit_code for node in nodes]
            raise OutcomeError(f"the nodes ended with {codes} before {what}; see make compose-logs")
        if time.monotonic() > deadline:
            raise OutcomeError(f"no {what} within {seconds:.0f} s; see make compose-logs")
        time.sleep(POLL_SECONDS)


def is_between_checkpoints(cluster: Cluster) -> bool:
    """Return True if the run trains, has steps to lose, and has two checkpoints (one may get damaged)."""
    saved = [int(str(event["step"])) for event in cluster.events() if event["kind"] == "checkpoint"]
    # `corrupt-checkpoint` damages the newest checkpoint, and needs an older one to resume from.
    return len(saved) > 1 and (live_step(cluster) or 0) > saved[-1]


def inject_fault(cluster: Cluster, name: str, index: int) -> ChaosRow:
    """Inject the fault into the running cluster and wait for its documented outcome. Raises ClusterError."""
    fault = FAULTS[name]
    until(cluster, lambda: is_between_checkpoints(cluster), "step after two checkpoints", READY_SECONDS)
    node = cluster.node(0 if fault.on_first else index)
    context = FaultContext(cluster, node, live_step(cluster) or 0, cluster.events()[-1], node.starts)
    began = time.monotonic()
    done = fault.inject(context)
    # Read after the fault: for a node that is only paused, training must get past this step.
    lifted_at_step = live_step(cluster) or 0
    happened, shaped = "", dict[str, str]()

    def exists() -> bool:
        nonlocal happened
        keep_shape(cluster, shaped)  # also after `make compose-up` has ended, as with the fault `stop`
        happened = fault.check(context) or ""
        floor = context.resumed()
        step = live_step(cluster)
        # A new generation begins at an earlier step, so its own progress counts.
        return bool(happened) and step is not None and step > (lifted_at_step if floor is None else floor)

    until(cluster, exists, f"documented outcome of {name}", OUTCOME_SECONDS)
    seconds = time.monotonic() - began
    resumed = context.resumed()
    if fault.needs_new_generation and resumed is None:
        raise OutcomeError(f"no world was opened after {name}, and one had to be")
    return ChaosRow(name, done, happened, seconds, 0 if resumed is None else max(0, context.step - resumed))


def own_cluster(project: str, image: str, run: str) -> Cluster:
    """Return a cluster for one row of the table."""
    return Cluster(project, {**OWN_RUN, "IMAGE": image, "RUN": run})


def finish(cluster: Cluster) -> str:
    """Wait for a successful end; return the weights' SHA-256. Raises OutcomeError."""
    job = ClusterJob.of(cluster)
    job.wait()
    remove_metrics(cluster)
    code, _ = job.result()
    summary = cluster.summary()
    if code or summary is None:
        raise OutcomeError(f"the run {cluster.variables['RUN']} ended with {code}; expected 0")
    return str(summary["weights_sha256"])


def table(project: str, image: str, index: int) -> int:
    """Test every fault in a new cluster; return 0 if all end with an uninterrupted run's weights, else 1."""
    stamp = time.strftime("%H%M%S")
    baseline = own_cluster(project, image, f"baseline-{stamp}")
    rows = []
    failed = 0
    try:
        start(baseline)
        expected = finish(baseline)
        print(f"baseline: uninterrupted, weights {expected[:12]}", flush=True)
        for name in FAULTS:
            cluster = own_cluster(project, image, f"{name}-{stamp}")
            start(cluster)
            try:
                row = inject_fault(cluster, name, index)
                same = finish(cluster) == expected
                print(f"{row}; weights {'as uninterrupted' if same else 'DIFFER'}", flush=True)
                rows.append((row, "yes" if same else "NO"))
                failed += not same
            except ClusterError as error:
                # One failed fault must not hide the results of the others.
                say(f"{name}: FAILED: {error}")
                failed += 1
    finally:
        # All rows use the same project, so this removes the clusters of all faults.
        baseline.compose("down", "--volumes", "--remove-orphans")
    print("\n| fault | what was done | what happened | training again | steps lost | same weights |")
    print("|---|---|---|---|---|---|")
    for row, same_weights in rows:
        cells = (row.fault, row.done, row.happened, f"{row.seconds:.1f} s", row.steps_lost, same_weights)
        print("| " + " | ".join(map(str, cells)) + " |")
    return 1 if failed else 0


def check_chaos(options: argparse.Namespace) -> None:
    """Check the fault and the node; needs no engine. Raises ClusterError."""
    if options.fault not in (*FAULTS, "all"):
        raise ClusterError(
            f"FAULT: invalid value {options.fault!r}; expected all or one of {', '.join(FAULTS)}: "
            "make chaos FAULT=kill-rank"
        )
    checked_node(options.node or "1")


def chaos(options: argparse.Namespace) -> int:
    """Inject one fault, or all. Raises ClusterError, and OutcomeError (1) if an outcome does not occur."""
    index = checked_node(options.node or "1")
    if options.fault == "all":
        return table(OWN_PROJECT, options.image or DEFAULT_IMAGE, index)
    cluster = Cluster.found(options.project)
    # Node 1 is only the default: a cluster of one node has none.
    if len(cluster.nodes()) <= index and not options.node:
        index = 0
    print(inject_fault(cluster, options.fault, index), flush=True)
    return 0
