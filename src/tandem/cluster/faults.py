"""The faults: how each is injected into a running cluster, and how its documented outcome is recognized.

If `inject` changes a node's link, cores or volume, it restores them before it returns. It does not restart
processes that it killed or stopped, because tandem must recover them. `check` then looks at the events since,
and returns a short text once the outcome has occurred, or None before that.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.cluster.engine import Cluster, ClusterError, Node, docker
from tandem.cluster.network import cut, repair

PAUSE_SECONDS = 6.0
FREEZE_ATTEMPTS = 5
PARTITION_SECONDS = 15.0
SLOW_SECONDS = 8.0
# Docker's --cpus: fractions of a core.
SLOW_CPUS = 0.1
# A few pages of tmpfs, less than any checkpoint.
FULL_BYTES = 16 * 1024
POLL_SECONDS = 0.25
FILL_SECONDS = 120.0

Event = Mapping[str, object]

RANKS = """
import os, pathlib, sys
def ranks():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:  # it has just ended
            continue
        if name.startswith("tandem-rank-"):
            yield int(pid), name.removeprefix("tandem-")
"""
SIGNAL_RANK = (
    RANKS
    + """
for pid, name in ranks():
    os.kill(pid, int(sys.argv[1]))
    sys.exit(print(name))
sys.exit("no rank runs here")
"""
)
# Rank 0 is stopped first, so that no newer checkpoint is written between the flip and the end of its node.
FLIP_NEWEST = (
    RANKS
    + """
for pid, _ in ranks():
    os.kill(pid, 19)
folder = max(path.parent for path in pathlib.Path(sys.argv[1]).glob("checkpoints/step-*/manifest.json"))
file = folder / "state.pt"
with file.open("r+b") as opened:
    opened.seek(file.stat().st_size // 2)
    byte = opened.read(1)[0]
    opened.seek(-1, 1)
    opened.write(bytes([byte ^ 1]))
print(int(folder.name.removeprefix("step-")))
"""
)
FILL_MEMORY = (
    RANKS
    + """
found = [pid for pid, _ in ranks()]
if not found:
    sys.exit("no rank runs here")
rank = pathlib.Path(f"/proc/{found[0]}")
(rank / "oom_score_adj").write_text("1000")
for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
    if os.path.exists(limit):
        most = int(open(limit).read())
def exists():
    return rank.exists() and "Z" not in (rank / "stat").read_text().rpartition(")")[2].split()[0]
if os.fork() == 0:  # the kernel may take the one that fills, too
    held = []
    while exists() and len(held) << 24 <= most:
        held.append(bytearray(b"x") * (1 << 24))
    os._exit(0)
os.wait()
if exists():
    sys.exit("the memory limit did not hold")
print(f"{most >> 20} MiB")
"""
)


@dataclass
class FaultContext:
    """A running cluster, the node to break, and the state before the fault."""

    cluster: Cluster
    node: Node
    step: int
    newest: dict[str, object] | None  # the newest event before the fault
    starts_before: int
    note: int = 0  # a step or rank that the fault must remember

    def since(self, kind: str) -> list[Event]:
        """Return the events of a kind after the fault; all events if earlier ones were rotated away."""
        events = self.cluster.events()
        if self.newest is not None and self.newest in events:
            events = events[events.index(self.newest) + 1 :]
        return [event for event in events if event["kind"] == kind]

    def resumed(self) -> int | None:
        """Return the step from which the newest generation resumed; None if none started since the fault."""
        found = self.since("resumed")
        return int(str(found[-1]["step"])) if found else None

    def continued(self) -> bool:
        """Return True if no generation has started since the fault, so the ranks are the same processes."""
        return not self.since("world")


@dataclass(frozen=True)
class Fault:
    """One fault. `inject` returns what was done; `needs_new_generation`: a new generation must start."""

    inject: Callable[[FaultContext], str]
    check: Callable[[FaultContext], str | None]
    on_first: bool = False  # always hits node 0, whatever NODE is
    needs_new_generation: bool = True


def _kill_rank(context: FaultContext) -> str:
    return f"killed {_signal_rank(context, signal.SIGKILL)} on node {context.node.index}"


def _hang(context: FaultContext) -> str:
    """Stop a rank and leave it stopped: the agents must find it and end it."""
    name = _signal_rank(context, signal.SIGSTOP)
    context.note = int(name.removeprefix("rank-"))
    return f"stopped {name} on node {context.node.index} in its tracks"


def _signal_rank(context: FaultContext, number: signal.Signals) -> str:
    """Send the signal to a rank of the node; return its name, such as `rank-1`."""
    return context.cluster.inside(context.node, SIGNAL_RANK, str(int(number))).strip()


def _kill_node(context: FaultContext) -> str:
    _kill(context, [context.node])
    return f"killed process 1 of node {context.node.index}"


def _kill(context: FaultContext, nodes: Sequence[Node]) -> None:
    """Kill process 1 from the host's PID namespace; `docker kill` would suspend the restart policy."""
    pids = " ".join(str(node.pid) for node in nodes)
    context.cluster.helper("sh", "-c", f"kill -9 {pids}", options=["--pid=host"])


def _pause(context: FaultContext) -> str:
    freeze(context.node.identity)
    try:
        time.sleep(PAUSE_SECONDS)
    finally:
        docker("unpause", context.node.identity)
    return f"froze node {context.node.index} for {PAUSE_SECONDS:.0f} s"


def freeze(container: str) -> None:
    """Pause the container, with retries: the container runtime gives up quickly on a busy host."""
    for _ in range(FREEZE_ATTEMPTS - 1):
        try:
            docker("pause", container)
            return
        except ClusterError as error:
            if "unable to freeze" not in str(error):
                raise
            time.sleep(1)
    docker("pause", container)


def _partition(context: FaultContext) -> str:
    cut(context.cluster, context.node)
    try:
        time.sleep(PARTITION_SECONDS)
    finally:
        repair(context.cluster, context.node)
    return f"cut node {context.node.index} off for {PARTITION_SECONDS:.0f} s"


def _slow(context: FaultContext) -> str:
    cpus = docker("inspect", "--format", "{{.HostConfig.NanoCpus}}", context.node.identity).strip()
    # NanoCpus is 0 without a limit; then all of the engine's cores are the limit afterward.
    before = int(cpus) / 1e9 or float(docker("info", "--format", "{{.NCPU}}").strip())
    docker("update", "--cpus", str(SLOW_CPUS), context.node.identity)
    try:
        time.sleep(SLOW_SECONDS)
    finally:
        docker("update", "--cpus", str(before), context.node.identity)
    return f"held node {context.node.index} to {SLOW_CPUS:g} cores for {SLOW_SECONDS:.0f} s"


def _disk_full(context: FaultContext) -> str:
    """Mount a full file system over the checkpoints, visible only to node 0, until a save has failed."""
    # The mount covers only the checkpoints, so events can still be written and read.
    folder = f"{context.cluster.run_dir}/checkpoints"
    # See docs/architecture.md#design-changes: mount needs SYS_ADMIN, and nsenter needs SYS_PTRACE.
    options = ["--pid=host", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_PTRACE"]
    enter = f"nsenter --target {context.node.pid} --mount --pid -- "
    full = f"mount -t tmpfs -o size={FULL_BYTES},mode=0777 full {folder}"
    context.cluster.helper("sh", "-c", enter + full, options=options)
    try:
        deadline = time.monotonic() + FILL_SECONDS
        while not context.since("checkpoint_failed"):
            if time.monotonic() > deadline:
                raise ClusterError(f"no save came within {FILL_SECONDS:.0f} s; lower TANDEM_CHECKPOINT_EVERY")
            time.sleep(POLL_SECONDS)
    finally:
        # Lazy, because a failed save may still have a file open there.
        context.cluster.helper("sh", "-c", f"{enter}umount -l {folder}", options=options)
    return "filled the checkpoint volume until a save failed"


def _corrupt(context: FaultContext) -> str:
    """Flip a bit in the newest checkpoint, and kill all nodes, because each has a newer state in memory."""
    context.note = int(context.cluster.inside(context.node, FLIP_NEWEST, context.cluster.run_dir))
    _kill(context, context.cluster.nodes())
    return f"flipped a bit of checkpoint {context.note} and killed process 1 of all nodes"


def _oom(context: FaultContext) -> str:
    output = context.cluster.inside(context.node, FILL_MEMORY).strip()
    return f"filled the memory of node {context.node.index} ({output}) until its rank was killed"


def _stop(context: FaultContext) -> str:
    context.cluster.compose("stop", "node")
    codes = [node.exit_code for node in context.cluster.nodes()]
    context.note = int(str((context.cluster.summary() or {}).get("last_checkpoint_step", 0)))
    # The stop saves a checkpoint, so steps until then are not lost.
    context.step = context.note
    # The nodes start before their codes are judged, so that a failed fault leaves a running cluster.
    context.cluster.compose("start", "node")
    if set(codes) != {143}:
        raise ClusterError(f"the nodes ended with {codes} after a stop; expected 143: make compose-logs")
    return f"stopped all nodes ({', '.join(map(str, codes))}) and started them"


def _next_generation(context: FaultContext) -> str | None:
    step = context.resumed()
    return None if step is None else f"the next generation resumed from step {step}"


def _was_reported(context: FaultContext) -> str | None:
    named = context.since("hang")
    outcome = _next_generation(context)
    for event in named:
        # More waiting does not turn a wrong report into a right one.
        if (event["rank"], event["node"]) != (context.note, context.node.index):
            raise ClusterError(
                f"rank {event['rank']} on node {event['node']} was reported, but rank {context.note} on node "
                f"{context.node.index} was stopped: make compose-logs"
            )
    if outcome is None or not named:
        return None
    return f"it was reported after {float(str(named[0]['seconds'])):.1f} s, {outcome}"


def _node_came_back(context: FaultContext) -> str | None:
    node = context.cluster.node(context.node.index)
    outcome = _next_generation(context)
    if outcome is None or node.starts <= context.starts_before:
        return None
    return f"Docker restarted it, {outcome}"


def _same_world(context: FaultContext) -> str | None:
    return "the same ranks continued" if context.continued() else _next_generation(context)


def _saves_again(context: FaultContext) -> str | None:
    failed = context.since("checkpoint_failed")
    saved = context.since("checkpoint")
    last = int(str(failed[-1]["step"]))
    later = [int(str(event["step"])) for event in saved if int(str(event["step"])) > last]
    if not later:
        return None
    return f"{len(failed)} saves failed, training continued, step {later[0]} was saved"


def _fell_back(context: FaultContext) -> str | None:
    step = context.resumed()
    outcome = _next_generation(context)
    if step is None or step >= context.note:
        return None
    return f"checkpoint {context.note} was set aside, {outcome}"


FAULTS: Mapping[str, Fault] = {
    "kill-rank": Fault(_kill_rank, _next_generation),
    "kill-rank0": Fault(_kill_rank, _next_generation, on_first=True),
    "hang": Fault(_hang, _was_reported),
    "kill-node": Fault(_kill_node, _node_came_back),
    "pause": Fault(_pause, _same_world, needs_new_generation=False),
    "partition": Fault(_partition, _same_world, needs_new_generation=False),
    "slow-node": Fault(_slow, _same_world, needs_new_generation=False),
    "disk-full": Fault(_disk_full, _saves_again, on_first=True, needs_new_generation=False),
    "corrupt-checkpoint": Fault(_corrupt, _fell_back, on_first=True),
    "oom": Fault(_oom, _next_generation),
    "stop": Fault(_stop, _next_generation),
}
