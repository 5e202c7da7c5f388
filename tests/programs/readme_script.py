import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
torch.distributed.init_process_group("gloo")
total = torch.tensor(parser.parse_args().lr)
torch.distributed.all_reduce(total)
print("the sum is", round(total.item(), 2), flush=True)
torch.distributed.destroy_process_group()
