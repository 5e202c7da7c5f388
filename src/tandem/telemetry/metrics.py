"""Every metric that tandem exports, declared once and set through its declaration.

`LOSS.set(0.5, split="train")` returns a sample, which the rank sends and its node's agent applies.
Documentation, rules and dashboard are checked against `FAMILIES`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from tandem.telemetry.meter import ACTIVITIES, PHASES

# Kinds of metrics: their declarations, and the samples made from them. Values are not stored here.

Labels = Mapping[str, tuple[str, ...]]


class Sample(NamedTuple):
    """One change of one metric, in the form in which it is sent.

    The value is the increment of a counter, the value of a gauge, the state of a state set, or the
    observations of a histogram. A gauge with the value None drops all its series.
    """

    name: str
    labels: dict[str, Any]
    value: float | str | Sequence[float] | None


@dataclass(frozen=True)
class Family:
    """One metric. `labels` maps a label to its possible values, () = any.

    With `by_node`, every node's agent has its own series; the agent adds the label `node`.
    """

    kind: ClassVar[str]

    short: str
    help: str
    group: str
    labels: Labels = field(default_factory=dict)
    by_node: bool = False

    @property
    def name(self) -> str:
        return f"tandem_{self.short}"

    @property
    def wire_names(self) -> tuple[str, ...]:
        """Names of the series in PromQL."""
        return (self.name,)


@dataclass(frozen=True)
class Counter(Family):
    """A metric that only grows. `late`: absent until first counted, because not every run has it."""

    kind = "counter"
    late: bool = False

    @property
    def wire_names(self) -> tuple[str, ...]:
        return (f"{self.name}_total",)

    # Positional only, so that a label may have any name.
    def inc(self, amount: float = 1, /, **labels: object) -> Sample:
        return Sample(self.name, labels, amount)


@dataclass(frozen=True)
class Gauge(Family):
    """A metric with a current value; `initial` None: absent until it is set."""

    kind = "gauge"
    initial: float | None = None

    def set(self, value: float, /, **labels: object) -> Sample:
        return Sample(self.name, labels, value)

    def clear(self) -> Sample:
        """Drop all series, for example of ranks that have ended."""
        return Sample(self.name, {}, None)


@dataclass(frozen=True)
class Histogram(Family):
    """A distribution of durations or sizes."""

    kind = "histogram"
    buckets: tuple[float, ...] = ()

    @property
    def wire_names(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))

    def observe(self, *values: float) -> Sample:
        return Sample(self.name, {}, values)


@dataclass(frozen=True)
class Info(Family):
    """Facts as labels."""

    kind = "info"

    def set(self, **labels: object) -> Sample:
        return Sample(self.name, labels, 1)


@dataclass(frozen=True)
class StateSet(Family):
    """One of several states, which are the values of its only label."""

    kind = "state set"

    @property
    def states(self) -> tuple[str, ...]:
        return self.labels[self.name]

    def enter(self, state: str) -> Sample:
        return Sample(self.name, {}, state)


def labels(*free: str, **known: tuple[str, ...]) -> Labels:
    """Combine labels of any value with labels of known values."""
    return dict.fromkeys(free, ()) | known


STATES = (
    "starting", "rendezvous", "resuming", "training", "evaluating", "checkpointing", "draining",
    "succeeded", "stopped", "failed",
)  # fmt: skip
FINAL_STATES = ("succeeded", "stopped", "failed")
SKIP_REASONS = ("amp_overflow", "nonfinite_loss", "nonfinite_grad")
RESTART_REASONS = ("elastic", "preemption", "crash", "hang", "unknown")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
STEP_BUCKETS = tuple(0.001 * 2**i for i in range(17))  # 1 ms to 66 s; doubling keeps the relative error equal
REQUEST_OUTCOMES = ("ok", "retried", "failed", "damaged")
SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

# fmt: off
BUILD_INFO = Info("build_info",
    "Software versions.", "identity", labels("version", "revision", "python", "torch", "cuda", "nccl"))
RUN_INFO = Info("run_info",
    "The run itself.", "identity", labels("run", "task", "platform", "backend", "precision", "config_hash"))
RUN_STATE = StateSet("run_state",
    "State of the run; exactly one state is 1.", "identity", {"tandem_run_state": STATES})
WORLD_SIZE = Gauge("world_size", "Ranks of the current generation.", "identity")
NODES = Gauge("nodes", "Nodes of the current generation.", "identity")
SPARE_NODES = Gauge("spare_nodes", "Nodes that wait to take the place of a lost one (--spares).", "identity")
RUN_START_TIMESTAMP_SECONDS = Gauge("run_start_timestamp_seconds",
    "When this launch started, Unix time.", "identity")

EPOCH = Gauge("epoch", "Epochs completed.", "progress")
EPOCHS_PLANNED = Gauge("epochs_planned", "Epochs planned for this run.", "progress")
GLOBAL_STEP = Gauge("global_step",
    "Optimizer steps done since the run's first launch; survives restarts.", "progress")
STEPS_PLANNED = Gauge("steps_planned", "Optimizer steps planned for this run.", "progress")
PROGRESS_RATIO = Gauge("progress_ratio", "Steps done over steps planned, 0 to 1.", "progress")
ESTIMATED_COMPLETION_TIMESTAMP_SECONDS = Gauge("estimated_completion_timestamp_seconds",
    "When training ends at the current pace, Unix time.", "progress")
LAST_STEP_TIMESTAMP_SECONDS = Gauge("last_step_timestamp_seconds",
    "When the last reported step ended, Unix time.", "progress")
STEPS = Counter("steps", "Optimizer steps done since the launch.", "progress")
SAMPLES = Counter("samples", "Training samples of all ranks since the launch.", "progress")
TOKENS = Counter("tokens",
    "Training tokens of all ranks since the launch, as reported by rank 0.", "progress", late=True)
TOKENS_PER_SECOND = Gauge("tokens_per_second",
    "Tokens of all ranks per second of step time, in the last log interval.", "progress")
STEPS_REPLAYED = Counter("steps_replayed", "Steps done again after a restart.", "progress")

STEP_DURATION_SECONDS = Histogram("step_duration_seconds",
    "Wall time of one optimizer step.", "time", buckets=STEP_BUCKETS)
STEP_PHASE_SECONDS = Counter("step_phase_seconds",
    "Step time by phase; the phases add up to the step.", "time", labels(phase=PHASES))
GRADIENT_SYNC_SECONDS = Counter("gradient_sync_seconds",
    "Gradient all-reduce time, hidden behind backward or exposed.",
    "time", labels(overlap=("hidden", "exposed")))
GRADIENT_SYNC_BYTES = Counter("gradient_sync_bytes", "Gradient bytes handed to the all-reduce.", "time")
ACTIVITY_SECONDS = Counter("activity_seconds",
    "Wall time by activity; adds up to the time since launch.", "time", labels(activity=ACTIVITIES))

RUN_SECONDS = Gauge("run_seconds",
    "Wall time of all launches of the run by part, as in tandem runs --goodput.", "time", labels("part"))
RESTART_COST_SECONDS = Gauge("restart_cost_seconds",
    "Steps redone, time away and restarts by their cause, in all launches.", "time", labels("cause"))

RANK_COMPUTE_SECONDS_MIN = Gauge("rank_compute_seconds_min",
    "Own time of the fastest rank in a typical step.", "stragglers")
RANK_COMPUTE_SECONDS_MEDIAN = Gauge("rank_compute_seconds_median",
    "Own time of the median rank (the lower of two middle ones).", "stragglers")
RANK_COMPUTE_SECONDS_MAX = Gauge("rank_compute_seconds_max",
    "Own time of the slowest rank in a typical step.", "stragglers")
SLOWEST_RANK = Gauge("slowest_rank", "The rank with the most own time.", "stragglers")
TYPICAL_STEP_SECONDS = Gauge("typical_step_seconds",
    "A typical step, with the waits for other ranks; absent for a script.", "stragglers")
RANK_COMPUTE_SECONDS = Gauge("rank_compute_seconds",
    "Own time of a typical step: all but the waits for other ranks.", "stragglers", labels("rank", "node"))
RANK_DATA_SECONDS = Gauge("rank_data_seconds",
    "Time of a typical step spent waiting for data.", "stragglers", labels("rank", "node"))
RANK_MEMORY_BYTES = Gauge("rank_memory_bytes",
    "Resident memory of a rank's process.", "stragglers", labels("rank"), by_node=True)
STRAGGLER_EXCESS_SECONDS = Gauge("straggler_excess_seconds",
    "Own time of the straggler above the median rank's; absent if there is no straggler.",
    "stragglers", labels("rank", "node", phase=PHASES))

LOSS = Gauge("loss", "Mean loss over all ranks in the last interval.", "optimization", labels("split"))
TRAIN_SCORE = Gauge("train_score",
    "Mean over the last interval of a sum that the task returns with its loss.", "optimization",
    labels("score"))
EVAL_SCORE = Gauge("eval_score", "Score of the last evaluation.", "optimization", labels("score"))
LEARNING_RATE = Gauge("learning_rate", "Learning rate of the last step.", "optimization", labels("group"))
GRAD_NORM = Gauge("grad_norm", "Gradient norm before clipping.", "optimization")
LOSS_SCALE = Gauge("loss_scale", "Loss scale of fp16 training.", "optimization")
GRAD_CLIPS = Counter("grad_clips", "Steps whose gradients were clipped.", "optimization")
STEPS_SKIPPED = Counter("steps_skipped",
    "Steps whose update was skipped.", "optimization", labels(reason=SKIP_REASONS))
DATA_ERRORS = Counter("data_errors",
    "Samples that could not be read.", "optimization", labels("reason"), by_node=True)
REPLICA_MISMATCHES = Counter("replica_mismatches",
    "Replicas whose parameters differed from rank 0's.", "optimization")
REPLAY_CHECKS = Counter("replay_checks",
    "Steps in which another rank repeated a micro-batch of each rank.", "optimization")
REPLAY_MISMATCHES = Counter("replay_mismatches",
    "Ranks whose gradients or state differed when another rank repeated their work.", "optimization")

BLOCK_REQUESTS = Counter("block_requests",
    "Requests for blocks of data on object stores, by outcome.", "data", labels(outcome=REQUEST_OUTCOMES),
    by_node=True)
BLOCK_BYTES = Counter("block_bytes", "Bytes of blocks received in complete answers.", "data", by_node=True)
BLOCK_NEEDED_BYTES = Counter("block_needed_bytes",
    "Bytes of the samples that readers have read from blocks on object stores.", "data", by_node=True)
BLOCK_CACHE_HITS = Counter("block_cache_hits",
    "Blocks that were in the cache when a rank began to read ahead to them.", "data", by_node=True)
BLOCK_WAIT_SECONDS = Counter("block_wait_seconds",
    "Time that readers waited for blocks, all processes of the ranks together.", "data", by_node=True)
BLOCKS_AHEAD = Gauge("blocks_ahead",
    "Blocks in the cache that a rank reads next or has just read.", "data", labels("rank"), by_node=True)
BLOCK_CACHE_BYTES = Gauge("block_cache_bytes", "Bytes in the node's block cache.", "data", by_node=True)
BLOCK_CACHE_LIMIT_BYTES = Gauge("block_cache_limit_bytes",
    "The most bytes that the node's block cache takes.", "data", by_node=True)

CHECKPOINT_SAVES = Counter("checkpoint_saves", "Checkpoints saved.", "checkpoints")
CHECKPOINT_SAVE_FAILURES = Counter("checkpoint_save_failures",
    "Checkpoint saves that failed.", "checkpoints")
CHECKPOINT_LOADS = Counter("checkpoint_loads", "Checkpoints loaded.", "checkpoints")
CHECKPOINT_LOAD_FAILURES = Counter("checkpoint_load_failures",
    "Checkpoint loads that failed.", "checkpoints")
CHECKPOINT_FALLBACKS = Counter("checkpoint_fallbacks",
    "Loads that had to use an older checkpoint.", "checkpoints")
CHECKPOINT_WRITTEN_BYTES = Counter("checkpoint_written_bytes", "Checkpoint bytes written.", "checkpoints")
CHECKPOINT_BLOCKED_SECONDS = Counter("checkpoint_blocked_seconds",
    "Time that checkpoints blocked training.", "checkpoints")
CHECKPOINT_SAVE_DURATION_SECONDS = Histogram("checkpoint_save_duration_seconds",
    "Time from snapshot to committed checkpoint.", "checkpoints", buckets=SAVE_BUCKETS)
SNAPSHOT_STEP = Gauge("snapshot_step",
    "Step of the newest state in the node's memory.", "checkpoints", by_node=True)
SNAPSHOT_INTERVAL_SECONDS = Gauge("snapshot_interval_seconds",
    "Shortest time between two states in memory with --snapshot-every auto; 0: at every step.", "checkpoints")
NEIGHBOR_COPY_STEP = Gauge("neighbor_copy_step",
    "Step of the newest copy of another node's shards in the node's memory.", "checkpoints", by_node=True)
# Starts at 0, so that a run whose saves never succeed also counts as stale, instead of having no series.
CHECKPOINT_LAST_SUCCESS_STEP = Gauge("checkpoint_last_success_step",
    "Step of the last checkpoint.", "checkpoints", initial=0.0)
CHECKPOINT_SIZE_BYTES = Gauge("checkpoint_size_bytes", "Size of the last checkpoint.", "checkpoints")
CHECKPOINT_LAST_SUCCESS_TIMESTAMP_SECONDS = Gauge("checkpoint_last_success_timestamp_seconds",
    "When the last checkpoint was committed, Unix time.", "checkpoints")
CHECKPOINT_INTERVAL_STEPS = Gauge("checkpoint_interval_steps",
    "Steps between checkpoints, 0 if not by steps.", "checkpoints")
CHECKPOINT_LAST_LOAD_DURATION_SECONDS = Gauge("checkpoint_last_load_duration_seconds",
    "Time the last load took.", "checkpoints")
CHECKPOINT_VOLUME_AVAILABLE_BYTES = Gauge("checkpoint_volume_available_bytes",
    "Free space on the checkpoint volume.", "checkpoints")
CHECKPOINT_VOLUME_SIZE_BYTES = Gauge("checkpoint_volume_size_bytes",
    "Size of the checkpoint volume.", "checkpoints")

RESTARTS = Counter("restarts",
    "Restarts since the run's first launch, by reason.", "life cycle",
    labels(reason=RESTART_REASONS))
PLANNED_STOPS = Counter("planned_stops",
    "Stops by a signal, with a save, after which the run was started again.", "life cycle")
SIGNALS_RECEIVED = Counter("signals",
    "Stop signals that node 0 received.", "life cycle", labels(signal=SIGNALS))
LOG_MESSAGES = Counter("log_messages",
    "Log messages at warning and above.", "life cycle", labels(level=("warning", "error", "critical")))
OUTGOING_REQUESTS = Counter("outgoing_requests",
    "Requests of node 0 to the webhook of --notify, or to Kubeflow Trainer's status endpoint.", "life cycle",
    labels(to=("webhook", "trainer"), outcome=("sent", "failed")), late=True)
COLLECT_ERRORS = Counter("collect_errors",
    "Metric samples that could not be used.", "life cycle", labels("source"))

GPU_INFO = Gauge("gpu_info",
    "What the GPU is; always 1.", "GPU", labels("gpu", "uuid", "name", "driver"), by_node=True)
GPU_UTILIZATION_RATIO = Gauge("gpu_utilization_ratio",
    "Time with a kernel running, 0 to 1.", "GPU", labels("gpu"), by_node=True)
GPU_MEMORY_USED_BYTES = Gauge("gpu_memory_used_bytes",
    "Device memory in use by all processes.", "GPU", labels("gpu"), by_node=True)
GPU_MEMORY_SIZE_BYTES = Gauge("gpu_memory_size_bytes", "Device memory.", "GPU", labels("gpu"), by_node=True)
GPU_TEMPERATURE_CELSIUS = Gauge("gpu_temperature_celsius",
    "Temperature of the GPU.", "GPU", labels("gpu"), by_node=True)
GPU_THROTTLED = Gauge("gpu_throttled",
    "1 while heat or hardware throttles the clocks.", "GPU", labels("gpu"), by_node=True)
TORCH_MEMORY_ALLOCATED_BYTES = Gauge("torch_memory_allocated_bytes",
    "Device memory in tensors of this node's ranks.", "GPU", labels("gpu"), by_node=True)
TORCH_MEMORY_RESERVED_BYTES = Gauge("torch_memory_reserved_bytes",
    "Device memory held by torch's allocator.", "GPU", labels("gpu"), by_node=True)
TORCH_MEMORY_PEAK_BYTES = Gauge("torch_memory_peak_bytes",
    "Most device memory in tensors so far.", "GPU", labels("gpu"), by_node=True)
GPU_ENERGY_JOULES = Counter("gpu_energy_joules",
    "Energy drawn; its rate is the power in watts.", "GPU", labels("gpu"), by_node=True)
TORCH_ALLOC_RETRIES = Counter("torch_alloc_retries",
    "Allocations that had to flush torch's cache first.", "GPU", by_node=True)
TORCH_OOMS = Counter("torch_ooms",
    "Allocations that failed because device memory ran out.", "GPU", by_node=True)

MODEL_FLOPS = Counter("model_flops", "Floating point operations of the model, all ranks.", "efficiency")
PEAK_FLOPS = Gauge("peak_flops", "Peak floating point operations per second of all devices.", "efficiency")
# fmt: on

# Collected from the module, so that no second list can miss a declaration.
FAMILIES: tuple[Family, ...] = tuple(each for each in globals().values() if isinstance(each, Family))


def wire_names(families: Iterable[Family] = FAMILIES) -> frozenset[str]:
    """Return every series name that rules and dashboards may use."""
    return frozenset(name for family in families for name in family.wire_names)


def markdown_table(families: Iterable[Family] = FAMILIES) -> str:
    """Return the table of docs/metrics.md: one row per family, with names as in PromQL."""
    lines = ["| group | metric | type | labels | meaning |", "|---|---|---|---|---|"]
    for family in families:
        name = family.wire_names[0] if family.kind != "histogram" else family.name
        shown = dict(family.labels) | ({"node": ()} if family.by_node else {})
        text = "; ".join(f"{name}: {', '.join(known)}" if known else name for name, known in shown.items())
        lines.append(f"| {family.group} | `{name}` | {family.kind} | {text} | {family.help} |")
    return "\n".join(lines) + "\n"
