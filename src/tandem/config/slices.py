"""The settings, in one slice per concern; each component receives only its slice.

A new setting is one line here. Its flag, TANDEM_ variable, TOML key, help, docs and Compose entry are derived
from it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.config.fields import (
    Auto,
    BelowOne,
    BestText,
    CadenceText,
    Certificate,
    CompileMode,
    Count,
    DpShare,
    Listening,
    LocalPath,
    LrScalingText,
    MeetingPoint,
    Natural,
    NodeRange,
    NonNegative,
    PathOrUrl,
    Positive,
    PowerSgd,
    ResumeText,
    Seconds,
    SecondsOrZero,
    Seed,
    SharesText,
    StepWindow,
    TrackerNames,
    WarmupText,
    WebhookUrl,
    setting,
)
from tandem.schedule import LrScaling, LrSchedule

ONE_PROCESS = ("single", "dp")
"""Strategies that use one rank, regardless of the number of GPUs."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run and its task"""

    task: str = setting(
        "digits", "task to train: a built-in name, FILE.py:Class or package.module:Class", fixed=True
    )
    task_fields: dict[str, str] = setting({}, "settings of the task: --task.NAME VALUE", fixed=True)
    run_dir: PathOrUrl | None = setting(
        None, "run directory, or s3://BUCKET/PREFIX; none: runs/TASK-TIME", per_node=True
    )
    epochs: Count = setting(4, "passes over the training set")
    steps: Count | None = setting(None, "optimizer steps to train; overrides epochs")
    seed: Seed = setting(
        0, "random seed for initial weights, data order, augmentation and dropout", fixed=True
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and batches"""

    data_dir: LocalPath = setting(
        Path("data"), "directory where datasets are found and cached", per_node=True
    )
    download: bool = setting(False, "let the task download its dataset")
    batch_size: Count = setting(240, "global batch: samples per optimizer step over all ranks", fixed=True)
    micro_batch_size: Count | None = setting(
        None, "samples per rank and forward pass; none: no gradient accumulation"
    )
    batch_shares: SharesText | None = setting(
        None, "how to split the batch between ranks, one number per rank; none: equally"
    )
    workers: Auto | Natural = setting(
        0, "data loader processes per rank; auto: the rank's CPUs minus one, at most 8, if loading needs them"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Optimization"""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "optimizer", fixed=True)
    lr: NonNegative = setting(0.1, "peak learning rate, before --lr-scaling")
    momentum: BelowOne = setting(0.9, "SGD momentum")
    weight_decay: NonNegative = setting(1e-4, "weight decay")
    schedule: LrSchedule = setting("cosine", "learning rate schedule after the warm-up")
    lr_scaling: LrScaling | LrScalingText = setting(
        "none", "scale --lr by --batch-size / BATCH, the global batch that it was tuned for (default 240)"
    )
    warmup: WarmupText = setting("0", "length of the linear warm-up")
    clip_norm: Positive | None = setting(None, "clip gradients to this norm; none: no clipping")
    on_nonfinite: Literal["skip", "stop"] = setting(
        "stop", "what to do when the loss or a gradient is not finite; stop also names the first such tensor"
    )


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Devices, precision and distribution"""

    strategy: Literal["single", "dp", "ddp", "fsdp"] | DpShare = setting(
        "ddp", "how to distribute the model; dp:0.5: dp with half as much work for the first GPU"
    )
    sync_batchnorm: bool = setting(False, "use SyncBatchNorm: statistics over the global batch", fixed=True)
    precision: Literal["fp32", "bf16", "fp16", "auto"] = setting(
        "fp32", "bf16 and fp16 use autocast; auto: bf16 if all GPUs support it", fixed=True
    )
    tf32: bool = setting(False, "use TF32 for fp32 matrix multiplication on GPUs (convolutions already do)")
    channels_last: bool = setting(False, "store images and convolution weights in channels-last format")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "device to train on; auto: a GPU if there is one"
    )
    devices_per_rank: Count = setting(1, "GPUs per process, for a model split over several")
    deterministic: bool = setting(False, "use deterministic kernels; required for exact resume on GPUs")
    compile: CompileMode = setting(
        None,
        "compile the model with torch.compile; reduce-overhead uses CUDA graphs, for many small kernels",
        bare="default",
    )
    threads: Auto | Count = setting(
        "auto",
        "CPU threads per rank; auto: an equal share of the cores or of the container's quota",
        per_node=True,
    )
    numa_binding: Literal["none", "node"] = setting(
        "none", "node: bind each rank to the CPUs of its GPU's NUMA node", per_node=True
    )

    @property
    def strategy_name(self) -> str:
        """The name in `strategy`, without a share."""
        return self.strategy.partition(":")[0]

    @property
    def dp_first_share(self) -> float:
        """The work of the first GPU under `dp`, relative to 1 for each other GPU."""
        return float(self.strategy.partition(":")[2] or 1)


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Gradient communication (ddp)"""

    gradient_compression: Literal["none", "bf16", "fp16"] | PowerSgd = setting(
        "none",
        "compress gradients before the all-reduce, for a slow network; RANK of PowerSGD's factors, default 4",
        fixed=True,
    )
    bucket_mb: Positive | None = setting(None, "DDP bucket size in MiB; none: PyTorch's default, 25")
    find_unused: bool = setting(
        False, "DDP's find_unused_parameters: some parameters get no gradient in some steps"
    )

    @property
    def powersgd_rank(self) -> int | None:
        """The rank of PowerSGD's factors; None for other compressions."""
        kind, _, rank = self.gradient_compression.partition(":")
        return int(rank or 4) if kind == "powersgd" else None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Nodes and restarts"""

    nodes: Count | None = setting(None, "number of nodes; none: detected from the platform")
    node_rank: Natural | None = setting(None, "rank of this node, when starting nodes by hand", per_node=True)
    master: MeetingPoint | None = setting(
        None,
        "address of node 0, when starting nodes by hand; ranks started by hand can also use a file",
        per_node=True,
    )
    nproc: Auto | Count = setting("auto", "ranks per node; auto: one per GPU, else 1")
    elastic: NodeRange | None = setting(None, "train with MIN to MAX nodes")
    spares: Natural = setting(0, "how many more nodes wait to take the place of a lost one")
    master_timeout: Seconds = setting(
        300.0, "how long to wait for the master and all nodes, and then for all ranks to connect"
    )
    shutdown_timeout: Seconds = setting(25.0, "time for ranks to save and exit after a stop signal")
    max_restarts: Natural = setting(5, "how many failures on this node to recover from before giving up")
    max_crash_loops: Count = setting(10, "consecutive starts without a new checkpoint before node 0 gives up")
    restart_on_error: bool = setting(False, "restart a script after its own errors too")
    fresh_interpreter: bool = setting(False, "start each rank of a script as a new interpreter")
    warm_gpu: bool = setting(
        False,
        "keep a CUDA context open in standby workers for faster restarts (about 0.5 GB per GPU; tasks only)",
        per_node=True,
    )


@dataclass(frozen=True, kw_only=True)
class ReliabilityConfig:
    """Hangs and diverging ranks"""

    phase_timeout: Seconds = setting(
        1800.0, "time limit for the start, the first step, an evaluation or a save"
    )
    hang_timeout: Auto | Seconds = setting(
        "auto",
        "time without progress until a hang; auto: seconds for a stopped rank, minutes for an idle one",
    )
    replica_check_every: CadenceText = setting("1epoch", "how often to compare the ranks' weights")
    replay_check: Auto | CadenceText = setting(
        "never",
        "how often another rank repeats a micro-batch, to find a node that computes wrongly; "
        "auto: at most 1% of time",
    )

    @property
    def hang_seconds(self) -> float | None:
        """`hang_timeout` in seconds; None for auto."""
        return None if self.hang_timeout == "auto" else float(self.hang_timeout)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and resuming"""

    checkpoint_every: CadenceText = setting(
        "1epoch", "how often to save a checkpoint; the last step is always saved"
    )
    checkpoint_keep: Count = setting(3, "number of newest checkpoints to keep")
    keep_best: BestText | None = setting(None, "also keep the best checkpoint by this score")
    keep_every: Count | None = setting(None, "also keep one checkpoint every N steps")
    snapshot_every: Auto | CadenceText = setting(
        "auto", "how often to snapshot the state in memory; auto: by the size and the cost of the copy"
    )
    resume: ResumeText = setting(
        "auto", "whether to resume from a checkpoint, and from which one", per_node=True
    )
    on_data_change: Literal["refuse", "continue"] = setting(
        "refuse", "when resuming with another training set: stop with exit code 2, or continue with a warning"
    )
    init_from: PathOrUrl | None = setting(
        None, "initial weights: a file, a run, or a torchvision name; parameters that match are loaded"
    )
    init_strict: bool = setting(False, "require a weight in --init-from for each parameter of the model")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation"""

    eval_every: CadenceText = setting("1epoch", "how often to evaluate")
    eval_batch_size: Count | None = setting(
        None, "evaluation samples per rank and forward pass; none: as in training"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Logs and displays"""

    log_every: CadenceText = setting("50", "how often to log and to write a line to metrics.jsonl")
    log_format: Literal["text", "json"] = setting(
        "text", "json: one object per line, for log collectors", per_node=True
    )
    progress: Literal["auto", "on", "off"] = setting(
        "auto", "show a progress bar; auto: on a terminal (extra: rich)"
    )
    tracker: Literal["tensorboard", "mlflow", "wandb"] | TrackerNames | None = setting(
        None,
        "write TensorBoard events, or send the run to MLflow or W&B (extras: tensorboard, mlflow, wandb)",
        per_node=True,
    )
    profile: StepWindow | None = setting(None, "record these steps with torch.profiler")
    notify: WebhookUrl | None = setting(
        None,
        "webhook that node 0 tells of failures, hangs, recoveries and the end; TANDEM_NOTIFY keeps it secret",
        per_node=True,
    )

    @property
    def has_tensorboard(self) -> bool:
        return "tensorboard" in (self.tracker or "").split(",")

    @property
    def remote_tracker(self) -> str | None:
        """The tracker other than TensorBoard: mlflow, wandb or None."""
        return next((name for name in (self.tracker or "").split(",") if name in ("mlflow", "wandb")), None)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The metrics page"""

    metrics: Listening = setting(
        "127.0.0.1:19469",
        "address that /metrics listens on, or a port of 127.0.0.1; if it is busy, a free port is used",
        per_node=True,
    )
    metrics_tls: Certificate | None = setting(
        None, "TLS certificate of the metrics page, and its key if that is in a separate file", per_node=True
    )
    metrics_token_file: LocalPath | None = setting(
        None, "file with the bearer token that clients must send", per_node=True
    )
    metrics_linger: SecondsOrZero = setting(15.0, "how long to wait for a last scrape after the end")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The host and port that the metrics page listens on."""
        host, _, port = self.metrics.rpartition(":")
        return host.strip("[]"), int(port)
