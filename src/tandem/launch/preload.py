"""Import what the fork server needs before it forks the first rank.

A rank that starts as a new interpreter spends about four seconds importing torch and the modules that DDP
imports lazily. The fork server imports them once per node, and every rank forked from it has them at once,
also after a restart. Importing this module does the work; only the fork server imports it.
"""

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from tandem.config import Settings
from tandem.torch_private import import_what_ddp_imports

import_what_ddp_imports()
Settings.from_dict(Settings().to_dict())  # builds pydantic's models and converters once: 0.2 s per rank saved
