"""Write weights for torch.distributed.checkpoint, through torch's own writer."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_dcp(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a directory that a job with any number of ranks can load. Needs no process group."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has no process group
        save(dict(weights), checkpoint_id=path, no_dist=True)
