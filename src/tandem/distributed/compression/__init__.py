"""Gradient compression for DDP: half precision, or low-rank factors.

During backward, DDP passes its buckets to a hook one after another, and at the end it waits for the futures
that the hook returned. One bucket contains the telemetry parameter, which each hook must exchange unchanged.
"""

from typing import Any

from tandem.config.slices import ExchangeConfig
from tandem.distributed.compression.base import Compression as Compression
from tandem.distributed.compression.half import Half
from tandem.distributed.compression.powersgd import PowerSGD
from tandem.distributed.group import ProcessGroup


def compression(config: ExchangeConfig, group: ProcessGroup) -> Compression | None:
    """Return the compression for --gradient-compression; all ranks call this.

    Raises ConfigError if it cannot be used.
    """
    if config.gradient_compression == "none":
        return None
    if config.powersgd_rank is not None:
        return PowerSGD(group, config.powersgd_rank)
    return Half(group, config.gradient_compression)


def ddp_arguments(config: ExchangeConfig) -> dict[str, Any]:
    """Return DDP's arguments for the settings that are only passed on."""
    size = {} if config.bucket_mb is None else {"bucket_cap_mb": config.bucket_mb}
    return {
        **size,
        "find_unused_parameters": config.find_unused,
    }
