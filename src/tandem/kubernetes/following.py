"""`tandem k8s logs`: show all pods of a run, including replacements, until the job has ended."""

import subprocess
import sys
import time
from typing import Any

from tandem.kubernetes.cluster import REMOVED, Target, jobs_of, kubectl_json, preflight
from tandem.kubernetes.job_state import container_lines, lives, outcome
from tandem.kubernetes.render import UsageError

POLL_SECONDS = 2.0
MISSED = 5  # how many consecutive answers may be missing while pods are followed
LAST_WORDS_SECONDS = 10.0  # for the rest of the logs, after the job has ended
LAST_LINES = 100  # of a pod that started earlier

Followed = dict[tuple[str, str, int], subprocess.Popen[bytes]]


def logs(target: Target) -> int:
    """Show the logs of all pods, each line with its pod's name; return the job's exit code.

    Raises UsageError if there is no job.
    """
    preflight(target)
    followed: Followed = {}
    printed = ""
    unseen = 0
    try:
        while True:
            found = jobs_of(target)
            unseen = 0 if found else unseen + 1
            # An API server may miss a request. Before any log was shown, the job more likely does not
            # exist.
            if unseen > (MISSED if followed else 0):
                raise UsageError(f"there is no job {target.name}; start one: {target.command('apply')}")
            if unseen:
                time.sleep(POLL_SECONDS)
                continue
            pods = kubectl_json(target, "pods")
            # Pods are followed before the result is read, so that the logs of a job that has ended are shown,
            # too.
            _follow(target, pods, followed)
            if end := outcome(found[0], pods):
                _wait(followed)
                print(f"{target.name} has ended: {end}", flush=True)
                return end.code
            waiting = "" if followed else _waiting(pods)
            if waiting and waiting != printed:
                print(printed := waiting, flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        for process in followed.values():
            # kubectl --follow would otherwise outlive this command.
            process.kill()
            process.wait()


def _follow(target: Target, pods: list[Any], followed: Followed) -> None:
    for pod in pods:
        name = pod["metadata"]["name"]
        for container, restarts in lives(pod):
            # The UID, because a replacement pod can have the same name.
            key = (pod["metadata"]["uid"], container, restarts)
            if key not in followed:
                command = target.kubectl("logs", name, "--container", container, "--follow", "--prefix")
                followed[key] = subprocess.Popen([*command, f"--tail={LAST_LINES}"])


def _waiting(pods: list[Any]) -> str:
    if not pods:
        return "waiting: the job has no pods yet"
    return "waiting for containers: " + "; ".join(line for pod in pods for line in container_lines(pod))


def _wait(followed: Followed) -> None:
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    for process in followed.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return  # the log of a lost node never closes


# `tandem k8s forward`: node 0's live page and metrics on this machine, until Ctrl-C.

PORT = 19469


def forward(target: Target, port: int = PORT) -> int:
    """Forward a local port to the metrics Service. Raises UsageError if there is no job or no Service."""
    preflight(target)
    if not jobs_of(target):
        raise UsageError(f"there is no job {target.name}; start one: {target.command('apply')}")
    found = [each["metadata"]["name"] for each in kubectl_json(target, REMOVED["Service"])]
    service = f"{target.name}-metrics"
    if service not in found:
        raise UsageError(
            f"the namespace has no Service {service}; older manifests lack it: kubectl port-forward "
            f"POD {port}:{PORT} with the name of node 0's pod"
        )
    print(f"live page: http://localhost:{port}/  metrics: http://localhost:{port}/metrics", flush=True)
    print("Ctrl-C ends it", file=sys.stderr, flush=True)
    try:
        command = target.kubectl("port-forward", f"service/{service}", f"{port}:{PORT}")
        return subprocess.run(command).returncode
    # Ctrl-C is the usual way to end it.
    except KeyboardInterrupt:
        return 0
