"""Add activation checkpointing to a task in one line: less memory for one more forward pass.

def build_model(self):
    return recomputed(Transformer(...), Block)
"""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(model: nn.Module, *kinds: type[nn.Module]) -> nn.Module:
    """Make the modules of `kinds` keep only their inputs in training, and run again during backward.

    Names, state and results do not change, including dropout. Raises ValueError if the model has no such
    module.
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
    """Return a subclass of `kind` with another forward.

    The class is changed, not the instance, because copies of a module run it with their own weights.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        # torch's reentrant variant has no gradients if no input requires one, as in a first layer.
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _classes[kind]
