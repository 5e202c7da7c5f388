"""Observe the collectives that user code calls, before they run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
SAME_SHAPES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast")
"""Collectives for which every rank must pass tensors of the same shapes."""


class CollectiveObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that calls `meet(name, shapes)` before each collective; an error from it stops the call.

    `shapes` has the shapes of all its tensors, or is empty for a collective whose shapes may differ between
    ranks.
    """

    def __init__(self, meet: Callable[[str, list[list[int]]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meet = meet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # c10d's operators have names such as allgather_ and _allgather_base_.
        name = func.name().partition("::")[2].partition(".")[0]
        # wait_tensor starts nothing: it waits for a collective that has been seen already.
        if func.namespace in NAMESPACES and not name.startswith("wait"):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            alike = any(word in name for word in SAME_SHAPES)
            self._meet(name.strip("_"), [[*each.shape] for each in tensors] if alike else [])
        return func(*args, **(kwargs or {}))
