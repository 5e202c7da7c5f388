"""Check that a training set is the checkpoint's, by its length, a few samples and its order.

The position in the data is a step. With another dataset, the step would silently mean other samples. Only
cheap values that draw no random numbers are compared: rows of tensors, file names and labels.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from tandem.data.datasets import TensorImages, TensorRows
from tandem.data.fetch import is_stream
from tandem.data.sampler import TORCH, GlobalOrder
from tandem.data.token_files import TokenWindows

PROBED_SAMPLES = 8
ELEMENTS = 4096
"""Limit for the elements of a row."""
CLOSE = 1e-3
"""Relative tolerance: the same data computed on another machine may differ in the last bits."""


def data_facts(dataset: Any, order: GlobalOrder) -> dict[str, Any]:
    """Return {"samples": count, "order": algorithm, "probe": [descriptions of a few samples]}.

    If the order depends on more than the count, such as the sizes of blocks, "order_of" is its fingerprint.
    Unknown facts are omitted. Empty for a dataset with of_rank(), which compares its parts itself.
    """
    if hasattr(dataset, "of_rank") or not hasattr(dataset, "__len__"):
        return {}
    count = len(dataset)
    if is_stream(dataset):
        return {"samples": count}
    indices = (
        sorted({number * (count - 1) // (PROBED_SAMPLES - 1) for number in range(PROBED_SAMPLES)})
        if count
        else []
    )
    try:
        probe = [_sample(dataset, index) for index in indices]
    except Exception:  # any class that only resembles one of these datasets
        probe = []
    own = {"order_of": order.fingerprint} if order.fingerprint else {}
    return {"samples": count, "order": order.algorithm, **own, "probe": probe if any(probe) else []}


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how a training set differs from a checkpoint's; "" if no difference is known."""
    was = saved.get("samples")
    count = now.get("samples")
    if isinstance(was, int) and isinstance(count, int) and was != count:
        return f"the training set had {was:,} samples and now has {count:,}"
    before = saved.get("probe") or []
    after = now.get("probe") or []
    if before and after and (len(before) != len(after) or not all(map(_alike, before, after))):
        return f"the training set has different samples than before, though the same number ({count or 0:,})"
    return ""


def reordered(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how the algorithm of the order, or its blocks, differ from the checkpoint's; "" if not.

    Manifests of versions that had only torch's shuffle do not name it.
    """
    was = saved.get("order", TORCH)
    is_now = now.get("order")
    if not saved or is_now is None:
        return ""
    if was == is_now:
        same = saved.get("order_of") == now.get("order_of")
        return "" if same else f"the definition of the order of samples ({is_now}) has changed"
    return f"the samples of an epoch were ordered by {str(was)[:80]!r} and are now ordered by {is_now!r}"


def _sample(dataset: Any, index: int) -> list[Any]:
    """Return a few numbers and words about a sample; empty if that would be expensive."""
    getitem = getattr(type(dataset), "__getitem__", None)
    if getitem is TensorDataset.__getitem__:
        return [_number(tensor[index]) for tensor in dataset.tensors]
    if isinstance(dataset, TensorImages):
        return [_number(dataset.images[index]), _number(dataset.labels[index])]
    if isinstance(dataset, TensorRows):
        return [_number(dataset.inputs[index]), _number(dataset.targets[index])]
    if getitem is TokenWindows.__getitem__:
        return [_number(dataset[index][0])]
    if getitem is Subset.__getitem__:
        inner = int(dataset.indices[index])
        return [inner, *_sample(dataset.dataset, inner)]
    if getitem is StackDataset.__getitem__:
        parts = dataset.datasets
        inside = parts.values() if isinstance(parts, dict) else parts
        return [each for part in inside for each in _sample(part, index)]
    if getitem is ConcatDataset.__getitem__:
        number = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[number - 1] if number else 0
        return [number, *_sample(dataset.datasets[number], index - before)]
    if isinstance(dataset, list | tuple):
        item = dataset[index]
        return [_number(each) for each in (item if isinstance(item, list | tuple) else [item])]
    return [*_of_list(dataset, "samples", index), *_of_list(dataset, "targets", index)]


def _of_list(dataset: Any, name: str, index: int) -> list[Any]:
    """Return an item of a list of a torchvision dataset: (file, class), or a label."""
    listed = getattr(dataset, name, None)
    if not isinstance(listed, list | Tensor) or len(listed) != len(dataset):
        return []
    item = listed[index]
    if isinstance(item, tuple) and item and isinstance(item[0], str | PurePath):
        # The data may be mounted elsewhere now; the directory of a class and the file's name stay the same.
        return ["/".join(PurePath(item[0]).parts[-2:])]
    return [_number(item)]


def _number(value: Any) -> Any:
    """Convert a tensor to one number; keep numbers and text; return "" for everything else."""
    if isinstance(value, Tensor):
        some = value.detach().reshape(-1)[:ELEMENTS]
        # Normalized data has a mean near zero, which a relative tolerance could not compare.
        value = float(some.abs().double().mean()) if some.numel() else 0.0
    if isinstance(value, str):
        return value[:80]
    if isinstance(value, bool | int):
        return int(value) if abs(value) < 2**62 else ""
    return value if isinstance(value, float) and math.isfinite(value) else ""


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-9)
    return bool(one == other)
