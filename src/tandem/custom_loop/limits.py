"""Reject what a custom loop does not support, and say what to do instead."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from tandem.config import Settings
from tandem.errors import ConfigError


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for settings of things that a custom loop does itself."""
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
    """Raise ConfigError if the batch size has changed.

    The position in the data is a step, which means the same samples only with the same batch size.
    """
    before = batch_size if saved is None else saved.get("batch_size", batch_size)
    if before != batch_size:
        raise ConfigError(
            f"cannot resume: batch_size was {before} and is {batch_size} now; restore the old value, or use "
            "another --run-dir or --resume never"
        )


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError for an object that yields batches, or nothing, instead of samples."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"run.batches: got a {kind}; expected a dataset: pass loader.dataset")
    if kind in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        raise ConfigError("run.batches: got the iterator of a DataLoader; expected a dataset")
    if not any(hasattr(dataset, name) for name in ("__getitem__", "__iter__", "of_rank")):
        raise ConfigError(f"run.batches: invalid type {kind}; expected a dataset")


@contextmanager
def hints_as_arguments(chosen: Collection[str]) -> Iterator[None]:
    """Name arguments of run.batches in errors, instead of flags that are not in `chosen`."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for name in ("batch_size", "steps", "epochs"):
            if name not in chosen:
                flag = "--" + name.replace("_", "-")
                text = text.replace(f"{flag} ", f"{name}=").replace(flag, f"{name}=")
        raise ConfigError(text.replace("=: ", ": ")) from error
