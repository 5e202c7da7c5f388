"""Transfer images as bytes and convert them to floats on the model's device: a quarter of the bus traffic.

def build_model(self):
    return normalized(resnet18(), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ConfigError


def normalized(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Make the model's first input uint8 images [B, C, H, W], which become (x / 255 - mean) / std.

    `mean` and `std` have one number per channel, in units of 255. Names and state do not change. On CPUs, the
    result has the same bits as torchvision's ToTensor and Normalize. Raises ConfigError if the lengths
    differ, and, in the forward pass, for images that are already floats.
    """
    if not mean or len(mean) != len(std) or 0 in std:
        given = f"normalized(mean={tuple(mean)}, std={tuple(std)})"
        raise ConfigError(f"{given}: expected one number per channel in both, and no std of 0")
    model.__class__ = _normalizing(type(model))
    # A plain attribute is in no state_dict, so checkpoints fit the model without this function.
    model._of_bytes = torch.tensor([mean, std]).view(2, 1, -1, 1, 1)
    return model


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _normalizing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` with another forward.

    The class is changed, not the instance, because copies of a module run it with their own weights.
    """

    @wraps(kind.forward)
    def forward(self: Any, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        if images.dtype != torch.uint8:
            raise ConfigError(
                f"a normalized() model got images of {images.dtype}; expected torch.uint8, as from "
                "torchvision's PILToTensor"
            )
        if self._of_bytes.device != images.device:  # only once: a copy in each step would wait for the GPU
            self._of_bytes = self._of_bytes.to(images.device)
        mean, std = self._of_bytes
        # One factor and one offset would be faster, but would round differently than ToTensor and Normalize.
        return kind.forward(self, images.to(torch.float32).div_(255).sub_(mean).div_(std), *args, **kwargs)

    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _classes[kind]
