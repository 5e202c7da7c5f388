import os
import sys
import threading

import neighbour  # beside this script

import tandem


class Pair:
    def __init__(self, ranks, factor):
        self.ranks, self.factor = ranks, factor


def summed(factor):
    def of_all_ranks(more, pair=Pair):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ranks = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(ranks)
        dist.destroy_process_group()
        print("rank", os.environ["RANK"], sys.argv)
        return pair(ranks * factor + more, neighbour.VALUE)

    return of_all_ranks


def fails():
    raise LookupError("no such thing")


done = tandem.launch(summed(10), 0.5)
assert isinstance(done.result, Pair), done
assert done.result.ranks.tolist() == [30.5] and done.result.factor == 7, vars(done.result)
assert done.run_dir.is_absolute() and done.run_dir.name.startswith("of_all_ranks-")
assert (done.summary["world_size"], done.summary["task"]) == (2, "of_all_ranks"), done.summary
for function in (fails, lambda: threading.Lock()):
    try:
        tandem.launch(function, nodes=1)
    except tandem.TandemError as error:
        print("CAUGHT", error.exit_code, str(error).replace("\n", "NEWLINE"))
