"""How the model is spread over ranks and devices: one file for each strategy, found by its name.

A new one is a file NAME.py with a class `Strategy` (what it must do: `base.Strategy`), and its name in the
choices of `--strategy` (config/slices.py). It is imported only where it is used: FSDP alone takes a second.
"""

from importlib import import_module
from typing import Any

from torch import nn

from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError

__all__ = ["Strategy", "load", "load_to_evaluate", "preload", "waits_inside"]

AS_TORCH_DOES, PLAIN = ExchangeConfig(), ComputeConfig()


def load(
    name: str, group: ProcessGroup, exchange: ExchangeConfig = AS_TORCH_DOES, compute: ComputeConfig = PLAIN
) -> Strategy:
    """The strategy `name`, such as `dp:0.5`, for the ranks of `group`. Raises ConfigError."""
    check_together(exchange, compute)
    strategy: Strategy = _class(name)(group, exchange, compute)
    return strategy


def check_together(exchange: ExchangeConfig, compute: ComputeConfig) -> None:
    """Raise ConfigError for an exchange that what is computed does not go with.

    Errors of one step would be in another scale than the next step's gradients; a compiled model is cut into
    graphs by buckets, of which torch lets none be smaller than DDP's first.
    """
    if exchange.powersgd_rank is not None and compute.precision == "fp16":
        raise ConfigError(
            "--gradient-compression powersgd does not work with --precision fp16, which rescales gradients; "
            "use --precision bf16 or fp32"
        )
    if compute.compile and exchange.bucket_mb is not None and exchange.bucket_mb < 1:
        raise ConfigError(
            f"--bucket-mb: invalid value {exchange.bucket_mb:g}; expected a number >= 1 with --compile"
        )


def load_to_evaluate(name: str, group: ProcessGroup) -> Strategy:
    """For weights that were trained under `name`, on as many ranks as there are now."""
    if not _class(name).shares_parameters:  # each rank has the whole model, however many there are
        name = "single" if group.size == 1 else "ddp"
    return load(name, group)


def waits_inside(strategy: Strategy, model: nn.Module) -> bool:
    """Whether a forward pass on GPUs waits for other ranks: for shares, DDP's buffers or SyncBatchNorm."""
    layers = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return layers or strategy.shares_parameters or has_buffers_beside_batchnorm(model)


def preload(name: str) -> None:
    """Import it in advance, in a process that may become a rank."""
    _class(name)


def _class(name: str) -> Any:
    return import_module(f"{__name__}.{name.partition(':')[0]}").Strategy
