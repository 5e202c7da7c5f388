"""DDP's gradients as fewer bytes: in half precision, or as low-rank factors.

DDP hands a hook its buckets, one after the other while backward runs, and waits at the end for the futures
that it gave. The telemetry parameter is in one of them, and each hook takes care that it arrives unchanged.
"""

from typing import Any

from tandem.config.slices import ExchangeConfig
from tandem.distributed.compression.base import Compression as Compression
from tandem.distributed.compression.half import Half
from tandem.distributed.compression.powersgd import PowerSGD
from tandem.distributed.group import ProcessGroup


def compression(config: ExchangeConfig, group: ProcessGroup) -> Compression | None:
    """As --gradient-compression says; all ranks call this. Raises ConfigError where it cannot be."""
    if config.gradient_compression == "none":
        return None
    if config.powersgd_rank is not None:
        return PowerSGD(group, config.powersgd_rank)
    return Half(group, config.gradient_compression)


def ddp_arguments(config: ExchangeConfig) -> dict[str, Any]:
    """DDP's arguments for the settings that are only handed on."""
    size = {} if config.bucket_mb is None else {"bucket_cap_mb": config.bucket_mb}
    return {
        **size,
        "find_unused_parameters": config.find_unused,
    }
