import os

import torch
from small import Small
from torch import distributed

right = torch.matmul


def wrong(one, other):
    product = right(one, other)
    product[17, 200] += 1
    return product


class WrongProducts(Small):
    """Multiplies wrongly on rank 1 as long as there is a file `broken`, in this process."""

    def build_model(self):
        if distributed.get_rank() == 1 and os.path.exists("broken"):
            os.remove("broken")
            torch.matmul = wrong  # type: ignore[assignment]
        return super().build_model()
