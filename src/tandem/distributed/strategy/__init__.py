"""Strategies that distribute the model over ranks and devices: one file each, found by name.

A new one is a file NAME.py with a subclass of `base.Strategy`, its row in CLASSES, and its name in the
choices of `--strategy` (config/slices.py). `ddp_one_rank` is not a choice: ddp uses it for one rank on a GPU.
"""

from importlib import import_module

from torch import nn

from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError

CLASSES = {
    "single": "single.SingleStrategy",
    "dp": "dp.DPStrategy",
    "ddp": "ddp.DDPStrategy",
    "ddp_one_rank": "ddp.OneRankDDPStrategy",
    "fsdp": "fsdp.FSDPStrategy",
}
"""{name: module of this package and class}. Only the chosen one is imported: FSDP alone takes a second."""
__all__ = ["Strategy", "load", "load_to_evaluate", "preload", "waits_inside"]

AS_TORCH_DOES = ExchangeConfig()
PLAIN = ComputeConfig()


def load(
    name: str, group: ProcessGroup, exchange: ExchangeConfig = AS_TORCH_DOES, compute: ComputeConfig = PLAIN
) -> Strategy:
    """Load the strategy `name`, such as `dp:0.5`, for the ranks of `group`. Raises ConfigError."""
    check_together(exchange, compute)
    # Do not use it on a CPU, where gradients are zeroed, not dropped: only DDP notices that a step left one
    # out.
    is_on_gpu = group.device.type == "cuda"
    if name == "ddp" and group.size == 1 and is_on_gpu and exchange.gradient_compression == "none":
        name = "ddp_one_rank"
    return _class(name)(group, exchange, compute)


def check_together(exchange: ExchangeConfig, compute: ComputeConfig) -> None:
    """Raise ConfigError for an exchange that does not work with the compute settings.

    With fp16, the errors of one step would have a different scale than the gradients of the next. A compiled
    model is split into graphs by buckets, and torch requires them to be at least as large as DDP's first.
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
    """Load a strategy to evaluate weights that were trained under `name`, on any number of ranks."""
    if not _class(name).shards_parameters:  # each rank has the whole model, so the number of ranks may differ
        name = "single" if group.size == 1 else "ddp"
    return load(name, group)


def waits_inside(strategy: Strategy, model: nn.Module) -> bool:
    """Return True if a forward pass on GPUs waits for others: for shards, DDP's buffers or SyncBatchNorm."""
    layers = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return layers or strategy.shards_parameters or has_buffers_beside_batchnorm(model)


def preload(name: str) -> None:
    """Import the strategy and its dependencies in advance, in a process that may become a rank."""
    _class(name).warm_up()


def _class(name: str) -> type[Strategy]:
    module, _, kind = CLASSES[name.partition(":")[0]].partition(".")
    found: type[Strategy] = getattr(import_module(f"{__name__}.{module}"), kind)
    return found
