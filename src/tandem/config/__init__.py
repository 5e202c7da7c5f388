"""Every setting, typed and documented, and where its value came from (`sources`).

A component is built from its own slice of the settings (`slices`), which `Settings` hands out:

    settings.run           RunConfig           task, task_fields, run_dir, run_name, epochs, steps, seed
    settings.data          DataConfig          data_dir, download, batch_size, micro_batch_size, workers
    settings.optimisation  OptimisationConfig  optimizer, lr, momentum, ..., clip_norm, on_nonfinite
    settings.compute       ComputeConfig       strategy, sync_batchnorm, precision, device, compile, threads
    settings.launch        LaunchConfig        nodes, node_rank, master, nproc, elastic, restarts, timeouts
    settings.reliability   ReliabilityConfig   hang_timeout, first_step_timeout, replica_check_every
    settings.checkpoint    CheckpointConfig    checkpoint_every, keep..., snapshot_every, resume, init_from
    settings.evaluation    EvaluationConfig    eval_every
    settings.telemetry     TelemetryConfig     log_every, log_format, progress, tensorboard, profile
    settings.metrics       MetricsConfig       metrics_host, metrics_port, metrics_linger, certificates, token

Field names are the flat ones (`settings.checkpoint.checkpoint_every`). A new setting is one line in `slices`.
"""

from tandem.config.arguments import Parser, as_flags, load
from tandem.config.fields import BestText, Count
from tandem.config.settings import SETTINGS, SLICES, Settings, checked
from tandem.config.show import as_toml, explain, markdown
from tandem.config.slices import (
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvaluationConfig,
    LaunchConfig,
    MetricsConfig,
    OptimisationConfig,
    ReliabilityConfig,
    RunConfig,
    TelemetryConfig,
)
from tandem.config.sources import FIELDS, OTHER_VARIABLES, VARIABLES, Given, Loaded, resolve

__all__ = [
    "FIELDS",
    "OTHER_VARIABLES",
    "SETTINGS",
    "SLICES",
    "VARIABLES",
    "BestText",
    "CheckpointConfig",
    "ComputeConfig",
    "Count",
    "DataConfig",
    "EvaluationConfig",
    "LaunchConfig",
    "Given",
    "Loaded",
    "MetricsConfig",
    "OptimisationConfig",
    "Parser",
    "ReliabilityConfig",
    "RunConfig",
    "Settings",
    "TelemetryConfig",
    "as_flags",
    "as_toml",
    "checked",
    "explain",
    "load",
    "markdown",
    "resolve",
]
