"""What a loop of one's own cannot be asked for, each with what to do instead."""

from typing import Any

from tandem.config import Settings
from tandem.errors import ConfigError


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for what a loop of one's own does by itself."""
    compute = settings.compute
    if compute.strategy not in ("ddp", "single"):
        raise ConfigError(
            f"--strategy {compute.strategy} is for tasks; a loop of one's own runs with ddp or single"
        )
    if compute.dist_bn != "broadcast":
        raise ConfigError(
            f"--dist-bn {compute.dist_bn} is for tasks; a loop of one's own saves rank 0's statistics, or "
            "those of the global batch with --sync-batchnorm"
        )
    if settings.exchange.gradient_compression == "powersgd":
        raise ConfigError(
            "--gradient-compression powersgd is for tasks: it remembers one backward pass a step, and a loop "
            "of one's own may take several; use bf16 or fp16"
        )
    if settings.exchange.static_graph:
        raise ConfigError("--static-graph is for tasks; in a loop of one's own leave it out")
    if compute.precision != "fp32":
        raise ConfigError(
            f"--precision {compute.precision} is for tasks; in a loop of one's own use torch.autocast"
        )
    if compute.compile or compute.compile_mode != "default":
        raise ConfigError(
            "--compile is for tasks; in a loop of one's own call torch.compile on the wrapped model"
        )


def check_batch_size(batch_size: int, saved: Any) -> None:
    """The position in the data is a step: it means the same samples only with the same batch size."""
    before = batch_size if saved is None else saved.get("batch_size", batch_size)
    if before != batch_size:
        raise ConfigError(
            f"cannot resume: batch_size was {before} and is {batch_size} now; give the old value, "
            "another --run-dir, or --resume never"
        )
