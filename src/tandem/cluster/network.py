"""Shape and cut a node's network with `tc` and `ip` in its network namespace.

They run in a helper container of the same image, which joins the node's namespace as root with NET_ADMIN. The
node itself needs no capability, and the host needs no tools.
"""

import re
from dataclasses import dataclass

from tandem.cluster.engine import Cluster, ClusterError, Node

DEVICE = "eth0"
# tbf reaches its rate only with a burst of at least rate / HZ (see tc-tbf(8)).
BURST = "256kb"
QUEUE = "400ms"  # how long a packet may wait before it is dropped
RATE = re.compile(r"[0-9]+(\.[0-9]+)?[kmgt]?bit", re.IGNORECASE)
LATENCY = re.compile(r"[0-9]+(\.[0-9]+)?(us|ms|s)")
LOSS = re.compile(r"[0-9]+(\.[0-9]+)?%")


@dataclass(frozen=True)
class LinkShape:
    """The limits of a node's outgoing traffic; empty means unlimited."""

    rate: str = ""
    latency: str = ""
    loss: str = ""

    def __bool__(self) -> bool:
        return bool(self.rate or self.latency or self.loss)

    def __str__(self) -> str:
        parts = [self.rate, self.latency and f"{self.latency} latency", self.loss and f"{self.loss} loss"]
        return ", ".join(part for part in parts if part)

    def check(self) -> None:
        """Raise ClusterError for a value that tc would reject."""
        for name, value, valid, example in (
            ("RATE", self.rate, RATE, "100mbit"),
            ("LATENCY", self.latency, LATENCY, "20ms"),
            ("LOSS", self.loss, LOSS, "1%"),
        ):
            if value and not valid.fullmatch(value):
                raise ClusterError(
                    f"{name}: invalid value {value!r}; expected a value such as {name}={example}"
                )

    def commands(self) -> list[str]:
        """Return the arguments of tc: netem outside, with the token bucket inside, or the bucket alone."""
        bucket = f"tbf rate {self.rate} burst {BURST} latency {QUEUE}"
        if not (self.latency or self.loss):
            return [f"qdisc replace dev {DEVICE} root handle 1: {bucket}"]
        delay = self.latency and f" delay {self.latency}"
        loss = self.loss and f" loss {self.loss}"
        outer = [f"qdisc replace dev {DEVICE} root handle 1: netem{delay}{loss}"]
        return outer + ([f"qdisc replace dev {DEVICE} parent 1: handle 2: {bucket}"] if self.rate else [])


def has_netem(cluster: Cluster) -> bool:
    """Return True if this kernel can delay and drop packets."""
    # On `lo` of the helper's own namespace, so no node is affected.
    tried = "tc qdisc add dev lo root netem delay 1ms && echo yes"
    return "yes" in cluster.helper("sh", "-c", tried, options=["--cap-add", "NET_ADMIN"], check=False)


def check_shape(cluster: Cluster, shape: LinkShape) -> None:
    """Raise ClusterError if the kernel cannot shape traffic as requested."""
    shape.check()
    if (shape.latency or shape.loss) and not has_netem(cluster):
        asked = f"{'LATENCY' if shape.latency else 'LOSS'}={shape.latency or shape.loss}"
        raise ClusterError(
            f"{asked} needs the kernel's netem, which this kernel has not; load it: sudo modprobe sch_netem; "
            "or leave LATENCY and LOSS out, RATE works without"
        )


def shape_of(cluster: Cluster) -> LinkShape:
    """Return the shape that the user requested at the start (RATE, LATENCY, LOSS)."""
    asked = cluster.variables
    return LinkShape(asked.get("RATE", ""), asked.get("LATENCY", ""), asked.get("LOSS", ""))


def keep_shape(cluster: Cluster, shaped: dict[str, str]) -> None:
    """Apply the user's shape to every running node, except those in `shaped` ({name: start time}).

    A restarted node has a new network, so it is shaped again. With an empty `shaped`, all nodes are shaped
    again, which undoes the changes of a fault.
    """
    shape = shape_of(cluster)
    for node in cluster.nodes() if shape else []:
        if node.status != "running" or shaped.get(node.name) == node.started_at:
            continue
        try:
            shape_node(cluster, node, shape)
            shaped[node.name] = node.started_at
        except ClusterError:
            # A node that ended or restarted in the meantime is shaped the next time.
            now = {each.identity: each for each in cluster.nodes()}.get(node.identity)
            if now and now.status == "running" and now.started_at == node.started_at:
                raise


def shape_node(cluster: Cluster, node: Node, shape: LinkShape) -> None:
    """Limit the node's outgoing traffic to `shape`; an empty shape removes all limits."""
    commands = shape.commands() if shape else [f"qdisc del dev {DEVICE} root"]
    # The removal fails if there is no limit yet.
    in_namespace(cluster, node, " && ".join(f"tc {command}" for command in commands), check=bool(shape))


def cut(cluster: Cluster, node: Node) -> None:
    """Take the node's link down: no traffic passes, and its address stays."""
    in_namespace(cluster, node, f"ip link set {DEVICE} down")


def repair(cluster: Cluster, node: Node) -> None:
    """Bring the link up again, with the default route that was lost with it."""
    route = f"ip route replace default via {node.gateway} dev {DEVICE}" if node.gateway else "true"
    in_namespace(cluster, node, f"ip link set {DEVICE} up && {route}")


def in_namespace(cluster: Cluster, node: Node, command: str, check: bool = True) -> None:
    """Run a shell command in the node's network namespace."""
    options = ["--network", f"container:{node.identity}", "--cap-add", "NET_ADMIN"]
    cluster.helper("sh", "-c", command, options=options, check=check)
