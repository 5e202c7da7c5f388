"""Every metric tandem exports, declared once; docs, rules and dashboard are checked against `FAMILIES`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.telemetry.meter import ACTIVITIES, PHASES

Kind = Literal["counter", "gauge", "histogram", "info", "state set"]

STATES = (
    "starting", "rendezvous", "resuming", "training", "evaluating", "checkpointing", "draining",
    "succeeded", "failed",
)  # fmt: skip
FINAL_STATES = ("succeeded", "failed")
SKIP_REASONS = ("amp_overflow", "nonfinite_loss", "nonfinite_grad")
RESTART_REASONS = ("elastic", "preemption", "crash", "hang", "unknown")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR2")
STEP_BUCKETS = tuple(0.001 * 2**i for i in range(17))
SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Family:
    """One metric: `labels` maps a label to its values, () = any; `initial` None = absent until set."""

    name: str
    kind: Kind
    help: str
    group: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    initial: float | None = None

    @property
    def wire_names(self) -> tuple[str, ...]:
        """Names of the series as PromQL sees them."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)


def _any(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: () for name in names}


def _rows(group: str, kind: Kind, *rows: tuple[str, str] | tuple[str, str, dict[str, tuple[str, ...]]],
          initial: float | None = None, buckets: tuple[float, ...] = ()) -> tuple[Family, ...]:  # fmt: skip
    return tuple(
        Family(f"tandem_{row[0]}", kind, row[1], group, row[2] if len(row) == 3 else {}, buckets, initial)
        for row in rows
    )


FAMILIES: tuple[Family, ...] = (
    *_rows("identity", "info",
        ("build_info", "Versions of what runs.",
            _any("version", "revision", "python", "torch", "cuda", "nccl")),
        ("run_info", "What this run is.",
            _any("run", "task", "platform", "backend", "precision", "config_hash"))),
    *_rows("identity", "state set", ("run_state", "What the run is doing; exactly one state is 1.")),
    *_rows("identity", "gauge",
        ("world_size", "Ranks in the current world."),
        ("nodes", "Nodes in the current world."),
        ("run_start_timestamp_seconds", "When this launch started, Unix time.")),
    *_rows("progress", "gauge",
        ("epoch", "Epochs completed."),
        ("epochs_planned", "Epochs this run is to complete."),
        ("global_step", "Optimizer steps done since the run's first launch; survives restarts."),
        ("steps_planned", "Optimizer steps this run is to do."),
        ("progress_ratio", "Steps done over steps planned, 0 to 1."),
        ("estimated_completion_timestamp_seconds", "When training ends at the current pace, Unix time."),
        ("last_step_timestamp_seconds", "When the last reported step ended, Unix time.")),
    *_rows("progress", "counter",
        ("steps", "Optimizer steps done since the launch."),
        ("samples", "Training samples of all ranks since the launch."),
        ("steps_replayed", "Steps done again after a restart.")),
    *_rows("time", "histogram", ("step_duration_seconds", "Wall time of one optimizer step."),
        buckets=STEP_BUCKETS),
    *_rows("time", "counter",
        ("step_phase_seconds", "Step time by phase; the phases add up to the step.", {"phase": PHASES}),
        ("gradient_sync_seconds", "Gradient all-reduce time, hidden behind backward or exposed.",
            {"overlap": ("hidden", "exposed")}),
        ("gradient_sync_bytes", "Gradient bytes handed to the all-reduce."),
        ("activity_seconds", "Wall time by activity; adds up to the time since launch.",
            {"activity": ACTIVITIES})),
    *_rows("stragglers", "gauge",
        ("rank_compute_seconds_min", "Own time of the fastest rank in a typical step."),
        ("rank_compute_seconds_median", "Own time of the median rank (the lower of two middle ones)."),
        ("rank_compute_seconds_max", "Own time of the slowest rank in a typical step."),
        ("slowest_rank", "The rank with the most own time."),
        ("rank_compute_seconds", "Own time of a typical step: all of it but the wait for gradients.",
            _any("rank", "node")),
        ("rank_data_seconds", "Time of a typical step spent waiting for data.", _any("rank", "node")),
        ("straggler_excess_seconds",
            "Own time above the median rank's, of a rank that holds the others back; absent without one.",
            {"rank": (), "node": (), "phase": PHASES})),
    *_rows("optimisation", "gauge",
        ("loss", "Mean loss over all ranks in the last interval.", _any("split")),
        ("eval_score", "Score of the last evaluation.", _any("score")),
        ("learning_rate", "Learning rate of the last step.", _any("group")),
        ("grad_norm", "Gradient norm before clipping."),
        ("loss_scale", "Loss scale of fp16 training.")),
    *_rows("optimisation", "counter",
        ("grad_clips", "Steps whose gradients were clipped."),
        ("steps_skipped", "Steps whose update was left out.", {"reason": SKIP_REASONS}),
        ("data_errors", "Samples that could not be read.", _any("reason")),
        ("replica_mismatches", "Replicas whose parameters differed from rank 0's.")),
    *_rows("checkpoints", "counter",
        ("checkpoint_saves", "Checkpoints saved."),
        ("checkpoint_save_failures", "Checkpoint saves that failed."),
        ("checkpoint_loads", "Checkpoints loaded."),
        ("checkpoint_load_failures", "Checkpoint loads that failed."),
        ("checkpoint_fallbacks", "Loads that had to use an older checkpoint."),
        ("checkpoint_written_bytes", "Checkpoint bytes written."),
        ("checkpoint_blocked_seconds", "Time training stood still for checkpoints.")),
    *_rows("checkpoints", "histogram",
        ("checkpoint_save_duration_seconds", "Time from snapshot to committed checkpoint."),
        buckets=SAVE_BUCKETS),
    # Starts at 0 so that a run whose saves never succeed is stale too, instead of having no series.
    *_rows("checkpoints", "gauge", ("checkpoint_last_success_step", "Step of the last checkpoint."),
        initial=0.0),
    *_rows("checkpoints", "gauge",
        ("checkpoint_size_bytes", "Size of the last checkpoint."),
        ("checkpoint_last_success_timestamp_seconds", "When the last checkpoint was committed, Unix time."),
        ("checkpoint_interval_steps", "Steps between checkpoints, 0 if not by steps."),
        ("checkpoint_last_load_duration_seconds", "Time the last load took."),
        ("checkpoint_volume_available_bytes", "Free space on the checkpoint volume."),
        ("checkpoint_volume_size_bytes", "Size of the checkpoint volume.")),
    *_rows("life cycle", "counter",
        ("restarts", "Worlds opened again, by reason.", {"reason": RESTART_REASONS}),
        ("signals", "Stop signals that node 0 received.", {"signal": SIGNALS}),
        ("log_messages", "Log messages at warning and above.", {"level": ("warning", "error", "critical")}),
        ("collect_errors", "Metric samples that could not be used.", _any("source"))),
    *_rows("GPU", "gauge",
        ("gpu_info", "What the GPU is; always 1.", _any("gpu", "uuid", "name", "driver")),
        ("gpu_utilization_ratio", "Time with a kernel running, 0 to 1.", _any("gpu")),
        ("gpu_memory_used_bytes", "Device memory in use by all processes.", _any("gpu")),
        ("gpu_memory_size_bytes", "Device memory.", _any("gpu")),
        ("gpu_temperature_celsius", "Temperature of the GPU.", _any("gpu")),
        ("gpu_throttled", "1 while heat or hardware holds the clocks down.", _any("gpu")),
        ("torch_memory_allocated_bytes", "Device memory in tensors of this node's ranks.", _any("gpu")),
        ("torch_memory_reserved_bytes", "Device memory held by torch's allocator.", _any("gpu")),
        ("torch_memory_peak_bytes", "Most device memory in tensors so far.", _any("gpu"))),
    *_rows("GPU", "counter",
        ("gpu_energy_joules", "Energy drawn; its rate is the power in watts.", _any("gpu")),
        ("torch_alloc_retries", "Allocations that had to flush torch's cache first."),
        ("torch_ooms", "Allocations that failed for want of device memory.")),
    *_rows("efficiency", "counter", ("model_flops", "Floating point operations of the model, all ranks.")),
    *_rows("efficiency", "gauge", ("peak_flops", "Peak floating point operations a second of all devices.")),
)  # fmt: skip


def wire_names(families: Iterable[Family] = FAMILIES) -> frozenset[str]:
    """Every series name that rules and dashboards may use."""
    return frozenset(name for family in families for name in family.wire_names)


def markdown_table(families: Iterable[Family] = FAMILIES) -> str:
    """The table of docs/metrics.md, one row per family, names as PromQL sees them."""
    lines = ["| group | metric | type | labels | meaning |", "|---|---|---|---|---|"]
    for family in families:
        name = family.wire_names[0] if family.kind != "histogram" else family.name
        labels = dict(family.labels) if family.kind != "state set" else {family.name: STATES}
        shown = "; ".join(f"{name}: {', '.join(known)}" if known else name for name, known in labels.items())
        lines.append(f"| {family.group} | `{name}` | {family.kind} | {shown} | {family.help} |")
    return "\n".join(lines) + "\n"
