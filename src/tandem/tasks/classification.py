"""Code that the classification tasks share: the loss with accuracy, and two small networks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LossAndSums = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""(mean loss, {name: (sum over the samples, number of samples)}), all tensors on the device of the batch."""


def cross_entropy(model: nn.Module, batch: Any) -> LossAndSums:
    """Return loss and accuracy of a batch (inputs, int64 labels [B]); logits are [B, classes]."""
    inputs, labels = batch
    logits = model(inputs)
    correct = (logits.argmax(dim=1) == labels).sum()
    count = torch.full_like(correct, len(labels))
    return functional.cross_entropy(logits, labels), {"accuracy": (correct, count)}


def strided_cnn(classes: int = 10) -> nn.Sequential:
    """Grayscale 28 x 28 images -> logits; three strided convolutions with batch norm, 11,074 parameters."""
    widths = (1, 8, 16, 32)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [
            # BatchNorm subtracts the mean, so a bias before it has no effect.
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 4 * 4, classes))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            # The paper's CIFAR networks pad with zeros here (option A). A projection is option B.
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


def small_resnet(width: int, classes: int = 10) -> nn.Sequential:
    """Color 32 x 32 images -> logits; ResNet-20 with width 16."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    inputs = width
    # Three stages of n = 3 blocks have 6n + 2 = 20 layers, counted as in the paper.
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range(3):
            layers.append(ResidualBlock(inputs, outputs, stride if block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
