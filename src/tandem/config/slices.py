"""The settings, one slice per concern: what a component is built from.

A new setting is one line here: flag, TANDEM_ variable, TOML key, help, docs and Compose follow from it.
"""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from tandem.config.fields import (
    Address,
    Auto,
    BelowOne,
    BestText,
    CadenceText,
    Count,
    InitMethod,
    Natural,
    NodeRange,
    NonNegative,
    Place,
    Port,
    Portion,
    Positive,
    ResumeText,
    RunMode,
    RunName,
    Seed,
    Share,
    SharesText,
    StepWindow,
    WarmupText,
    setting,
)
from tandem.schedule import WARMUP_FACTOR, LrScaling, LrSchedule, WarmupMode

RUN_MODES = {"private": "700", "group": "750", "world": "755"}
ONE_PROCESS = ("single", "dp")
"""Strategies that take one rank, whatever GPUs there are."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run and its task"""

    task: str = setting("digits", "a built-in task, FILE.py:Class or package.module:Class", fixed=True)
    task_fields: dict[str, str] = setting({}, "the task's own settings: --task.NAME VALUE", fixed=True)
    run_dir: Place | None = setting(
        None, "for all that a run writes: a folder or s3://BUCKET/PREFIX; none: runs/TASK-TIME", per_node=True
    )
    run_mode: RunMode = setting(
        "private", "who may look into a run directory that is made: its owner, the group, all", per_node=True
    )
    run_name: RunName | None = setting(None, "the run's name in metrics and reports")
    epochs: Count = setting(4, "passes over the training set")
    steps: Count | None = setting(None, "optimizer steps to train; overrides epochs")
    seed: Seed = setting(0, "decides initial weights, order, augmentation and dropout", fixed=True)

    @property
    def place(self) -> PurePath:
        """The run directory of a run that has begun (see launch/run_dir.py)."""
        assert self.run_dir is not None
        return self.run_dir

    @property
    def folder_mode(self) -> int:
        """What `run_mode` says, as chmod(2) takes it."""
        return int(RUN_MODES.get(self.run_mode, self.run_mode), 8)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and batches"""

    data_dir: Path = setting(Path("data"), "where data sets are looked for and cached", per_node=True)
    download: bool = setting(False, "let a task download its data set")
    batch_size: Count = setting(240, "global batch: samples per optimizer step over all ranks", fixed=True)
    micro_batch_size: Count | None = setting(None, "samples per rank and pass; none: all at once")
    batch_shares: Auto | SharesText | None = setting(
        None, "each rank's part of a batch; auto: by the pace of the first steps; none: equal"
    )
    workers: Auto | Natural = setting(
        0, "loader processes per rank; auto: one for each of its CPUs but one, up to 8, where they are of use"
    )


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """Optimisation"""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "optimizer", fixed=True)
    lr: NonNegative = setting(0.1, "peak learning rate, before lr_scaling")
    momentum: BelowOne = setting(0.9, "momentum of sgd")
    weight_decay: NonNegative = setting(1e-4, "weight decay")
    schedule: LrSchedule = setting("cosine", "learning rate after the warm-up")
    lr_scaling: LrScaling = setting(
        "none", "how lr grows with batch_size / lr_base_batch_size; auto: linear for sgd, else sqrt"
    )
    lr_base_batch_size: Count = setting(240, "the global batch that lr was found with")
    warmup: WarmupText = setting("0", "length of the warm-up")
    warmup_mode: WarmupMode = setting(
        "linear", "warm-up from a first small step, at a constant rate, or from zero"
    )
    warmup_factor: Share = setting(WARMUP_FACTOR, "share of the peak rate in a constant warm-up")
    clip_norm: Positive | None = setting(None, "largest gradient norm; none: no clipping")
    clip_value: Positive | None = setting(
        None, "clamps every element of the gradients to -value to value; none: leaves them"
    )
    on_nonfinite: Literal["skip", "stop", "raise"] = setting(
        "stop", "at a loss or gradients that are not finite"
    )


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Devices, precision and distribution"""

    strategy: Literal["single", "dp", "ddp", "fsdp"] = setting("ddp", "how the model is distributed")
    dp_first_share: Portion = setting(1.0, "dp: what the first GPU computes, beside 1 for each of the others")
    sync_batchnorm: bool = setting(False, "batch norm over the global batch", fixed=True)
    dist_bn: Literal["broadcast", "reduce"] = setting(
        "broadcast", "batch norm's statistics in evaluation and saves: rank 0's, or the mean over ranks"
    )
    precision: Literal["fp32", "bf16", "fp16", "auto"] = setting(
        "fp32", "bf16 and fp16 are by autocast; auto: bf16 where all GPUs have it", fixed=True
    )
    tf32: bool = setting(False, "products of fp32 in TF32 on GPUs; convolutions are so anyway")
    channels_last: bool = setting(False, "pictures and convolutions with the channels last in memory")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU where there is one")
    devices_per_rank: Count = setting(1, "GPUs of one process, for a model whose parts lie on several")
    deterministic: bool = setting(
        False, "only kernels that give the same bits each time; on GPUs exact resumes need it"
    )
    compile: bool = setting(False, "compile the model with torch.compile")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = setting(
        "default", "how --compile does it; reduce-overhead: CUDA graphs, for steps of many small kernels"
    )
    threads: Auto | Count = setting(
        "auto",
        "CPU threads per rank; auto: its share of the cores, or of the container's quota",
        per_node=True,
    )
    numa_binding: Literal["none", "node"] = setting(
        "none", "node: a rank runs on the CPUs beside its GPU", per_node=True
    )


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """The exchange of gradients by ddp"""

    gradient_compression: Literal["none", "bf16", "fp16", "powersgd"] = setting(
        "none", "what gradients travel as: fewer bytes for a slow network", fixed=True
    )
    powersgd_rank: Count = setting(4, "rank of the factors that powersgd sends of a matrix", fixed=True)
    bucket_mb: Positive | None = setting(None, "MiB of gradients in one all-reduce; none: torch's 25")
    find_unused: bool = setting(False, "parameters may be without a gradient, others in each step")
    static_graph: bool = setting(False, "every step uses the same parameters in the same way")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Nodes and restarts"""

    nodes: Count | None = setting(None, "number of nodes; none: what the platform says")
    node_rank: Natural | None = setting(None, "index of this node, by hand", per_node=True)
    master: Address | None = setting(None, "address of node 0, by hand", per_node=True)
    init_method: InitMethod | None = setting(
        None, "how ranks started by hand meet; none: as env://, by MASTER_ADDR and MASTER_PORT", per_node=True
    )
    nproc: Auto | Count = setting("auto", "ranks per node; auto: one per GPU, else 1")
    elastic: NodeRange | None = setting(None, "train with MIN to MAX nodes")
    elastic_settle: NonNegative = setting(10.0, "seconds that MIN nodes wait for more at the start")
    master_timeout: Positive = setting(300.0, "seconds to wait for the master and all nodes")
    shutdown_timeout: Positive = setting(25.0, "seconds ranks get to save and end after a signal")
    max_restarts: Natural = setting(5, "incidents that are restarted on this node before giving up")
    max_starts: Count = setting(10, "starts in a row that save nothing new until node 0 gives up")
    restart_on_error: bool = setting(False, "start a script again after its own errors, too")
    cold: bool = setting(False, "start each rank of a script as a new interpreter")
    standby_gpu: bool = setting(
        False, "what stands by for a restart has its GPU open, for some 0.5 GB of it (tasks)", per_node=True
    )


@dataclass(frozen=True, kw_only=True)
class ReliabilityConfig:
    """Hangs, and ranks that differ"""

    first_step_timeout: Positive = setting(
        1800.0, "seconds that the start, the first step, an evaluation or a save may take"
    )
    connect_timeout: Positive = setting(
        300.0, "seconds that NCCL, or gloo, may take to connect all ranks, once they have met"
    )
    hang_timeout: Auto | Positive = setting(
        "auto", "seconds until a step is a hang; auto: five of the longest recent steps, at least 10"
    )
    replica_check_every: CadenceText = setting("1epoch", "how often to compare the ranks' weights")

    @property
    def hang_seconds(self) -> float | None:
        """What `hang_timeout` says; None for auto."""
        return None if self.hang_timeout == "auto" else float(self.hang_timeout)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and resuming"""

    checkpoint_every: CadenceText = setting("1epoch", "how often to save; the end is always saved")
    checkpoint_keep: Count = setting(3, "newest checkpoints to keep")
    keep_best: BestText | None = setting(None, "keep the best one by this score, too")
    keep_every: Count | None = setting(None, "keep one for every so many steps, too")
    snapshot_every: Auto | CadenceText = setting(
        "auto", "copies in the node's memory; auto: each step on CPUs, every 5s on GPUs"
    )
    checkpoint_failures_allowed: Natural = setting(3, "failed saves in a row before the run fails")
    resume: ResumeText = setting("auto", "whether to go on from a checkpoint, and from which", per_node=True)
    init_from: Place | None = setting(
        None, "weights to start from: a file, a run, or torchvision's name; what fits is loaded"
    )
    init_min: Share = setting(0.0, "share of the model's parameters that init_from has to give")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation"""

    eval_every: CadenceText = setting("1epoch", "how often to evaluate")
    eval_batch_size: Count | None = setting(
        None, "samples per rank and pass of an evaluation; none: as many as in training"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Logs and displays"""

    log_every: CadenceText = setting("50", "how often to log, and to write a line of metrics.jsonl")
    log_format: Literal["auto", "text", "json"] = setting(
        "auto", "json lines for a collector, or text; auto: text", per_node=True
    )
    progress: Literal["auto", "on", "off"] = setting(
        "auto", "progress bar; auto: on a terminal (extra: rich)"
    )
    tensorboard: bool = setting(False, "write TensorBoard events (extra: tensorboard)")
    tracker: Literal["mlflow", "wandb"] | None = setting(
        None, "send settings, metrics and scores to a tracker (extras: mlflow, wandb)", per_node=True
    )
    profile: StepWindow | None = setting(None, "steps to record with torch.profiler")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The metrics page"""

    metrics_host: str = setting("127.0.0.1", "address that /metrics listens on", per_node=True)
    metrics_port: Port = setting(
        9469, "port of /metrics; a busy one is replaced by a free one", per_node=True
    )
    metrics_cert: Path | None = setting(None, "certificate (PEM) to serve the metrics by TLS", per_node=True)
    metrics_key: Path | None = setting(None, "its key (PEM), if it is in a file of its own", per_node=True)
    metrics_token_file: Path | None = setting(
        None, "file with a bearer token that readers need", per_node=True
    )
    metrics_linger: NonNegative = setting(15.0, "seconds to wait for the last scrape, if any")
