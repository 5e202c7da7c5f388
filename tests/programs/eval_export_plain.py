import sys

import torch
from torch import nn

assert "tandem" not in sys.modules
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
if sys.argv[1].endswith(".pt"):
    weights = torch.load(sys.argv[1], weights_only=True)
else:
    from safetensors.torch import load_file

    weights = load_file(sys.argv[1])
model.load_state_dict(weights)
torch.save(model.eval()(torch.linspace(-1, 1, 80).reshape(10, 8)), sys.argv[2])
