"""Import what the fork server needs before it forks the first rank.

A rank started from scratch spends about four seconds in `import torch` and in what DDP imports lazily. The
fork server pays that once per node, and every rank forked from it, also after a restart, has the modules at
once. Only the fork server imports this module, so it works at import time.
"""

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from tandem.config import Settings
from tandem.torch_private import import_what_ddp_imports

import_what_ddp_imports()
Settings.from_dict(Settings().to_dict())  # builds pydantic's models and converters once: 0.2 s per rank saved
