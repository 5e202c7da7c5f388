"""Activation checkpointing in one line of a task: less memory for a forward pass more.

def build_model(self):
    return recomputed(Transformer(...), Block)
"""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(model: nn.Module, *kinds: type[nn.Module]) -> nn.Module:
    """`model`, whose modules of `kinds` keep only their inputs in training, and run again in backward.

    Names, state and numbers stay the same, dropout included. Raises ValueError where there is none of them.
    """
    chosen = [module for module in model.modules() if isinstance(module, kinds)]
    if not chosen:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"recomputed({type(model).__name__}, {names}): the model has no such module")
    for module in chosen:
        module.__class__ = _recomputing(type(module))
    return model


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with another forward: of a class, because copies of a module run it with their own weights."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _classes[kind]
