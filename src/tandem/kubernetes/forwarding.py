"""`tandem k8s forward`: node 0's live page and metrics on this machine, until Ctrl-C."""

import subprocess
import sys

from tandem.kubernetes.cluster import REMOVED, Target, jobs_of, kubectl_json, preflight
from tandem.kubernetes.render import UsageError

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
