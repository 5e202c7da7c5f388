import os
import sys

import torch

from tandem.training.flops import peak_flops

torch.cuda.get_device_name = lambda device: "NVIDIA A40"  # type: ignore[assignment, misc]
gpu = torch.device("cuda", 0)
for settings in sys.argv[1:]:
    if os.fork() == 0:
        exec(settings)
        print(peak_flops(gpu, "fp32"), peak_flops(gpu, "fp32", convolves=True), flush=True)
        os._exit(0)
    os.wait()
