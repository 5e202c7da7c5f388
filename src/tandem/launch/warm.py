"""What the fork server imports before it forks the first rank.

A rank started from scratch spends about four seconds in `import torch` and in what DDP imports lazily.
The fork server pays that once per node; every rank forked from it, also after a restart, starts warm.
Importing this module is its whole purpose, so it works at import time, and only in the fork server.
"""

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from tandem.config import Settings
from tandem.torch_private import import_what_ddp_imports

import_what_ddp_imports()
Settings.from_dict(Settings().to_dict())  # pydantic and a converter per setting: 0.2 s that no rank spends
