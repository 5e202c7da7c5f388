"""What a loop of one's own cannot be asked for, each with what to do instead."""

from typing import Any

from tandem.config import Settings
from tandem.errors import ConfigError


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for what a loop of one's own does by itself."""
    compute = settings.compute
    if compute.strategy not in ("ddp", "single"):
        raise ConfigError(
            f"--strategy {compute.strategy} works only in tasks; a custom loop needs ddp or single"
        )
    if settings.exchange.powersgd_rank is not None:
        raise ConfigError(
            "--gradient-compression powersgd works only in tasks: it expects one backward pass per step, but "
            "a custom loop may take several; use bf16 or fp16"
        )
    if compute.precision != "fp32":
        raise ConfigError(
            f"--precision {compute.precision} works only in tasks; in a custom loop use torch.autocast"
        )
    if compute.compile is not None:
        raise ConfigError(
            "--compile works only in tasks; in a custom loop call torch.compile on the wrapped model"
        )


def check_batch_size(batch_size: int, saved: Any) -> None:
    """The position in the data is a step: it means the same samples only with the same batch size."""
    before = batch_size if saved is None else saved.get("batch_size", batch_size)
    if before != batch_size:
        raise ConfigError(
            f"cannot resume: batch_size was {before} and is {batch_size} now; restore the old value, or use "
            "another --run-dir or --resume never"
        )
