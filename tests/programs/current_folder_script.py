import os
import random  # noqa: F401
import sys
import tabnanny  # noqa: F401

import neighbour  # noqa: F401
import torch.distributed as dist

dist.init_process_group("gloo")
print("path", sys.path[0], "safe", os.environ.get("PYTHONSAFEPATH"), flush=True)
dist.destroy_process_group()
