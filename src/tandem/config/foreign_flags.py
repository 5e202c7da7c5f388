"""Flags of other trainers and their tandem equivalents, for the "did you mean" of an error message."""

from collections.abc import Mapping

GLOBAL_BATCH = "--batch-size, samples per step over all ranks"
PASSES = "--micro-batch-size, samples per rank and pass: --batch-size / ranks / accumulated passes"
RUN_DIR = "--run-dir, for all that a run writes"

TORCHRUN: Mapping[str, str] = {
    "--nnodes": "--nodes",
    "--nproc-per-node": "--nproc",
    "--master-addr": "--master HOST:PORT",
    "--master-port": "--master HOST:PORT",
    "--rdzv-endpoint": "--master HOST:PORT",
    "--rdzv-backend": "--master HOST:PORT",
}
"""torchrun's flags with a value that `tandem launch` translates (`launch/torchrun_flags.py`)."""

BROUGHT_ALONG: Mapping[str, str] = {
    **{flag.lstrip("-"): ours for flag, ours in TORCHRUN.items()},
    # arguments that torchrun's tutorials pass to scripts
    "world-size": "--nodes and --nproc",
    "local-rank": "LOCAL_RANK=0 in the environment",
    "rank": "RANK=0 in the environment",
    # nodes, ranks and devices
    "gpus": "--nproc, ranks per node",
    "num-gpus": "--nproc, ranks per node",
    "gpus-per-node": "--nproc, ranks per node",
    "devices": "--nproc, ranks per node",
    "num-processes": "--nodes and --nproc, ranks per node",
    "num-nodes": "--nodes",
    "num-machines": "--nodes",
    "machine-rank": "--node-rank",
    "accelerator": "--device",
    "cpu": "--device cpu",
    "use-cpu": "--device cpu",
    "no-cuda": "--device cpu",
    # length and batches
    "num-epochs": "--epochs",
    "max-epochs": "--epochs",
    "num-train-epochs": "--epochs",
    "max-steps": "--steps",
    "num-steps": "--steps",
    "train-steps": "--steps",
    "bs": GLOBAL_BATCH,
    "train-batch-size": GLOBAL_BATCH,
    "per-device-train-batch-size": GLOBAL_BATCH,
    "per-device-eval-batch-size": "--eval-batch-size",
    "val-batch-size": "--eval-batch-size",
    "gradient-accumulation-steps": PASSES,
    "accumulate-grad-batches": PASSES,
    "grad-accum": PASSES,
    "num-workers": "--workers",
    "dataloader-num-workers": "--workers",
    "data": "--data-dir",
    "data-path": "--data-dir",
    # optimization and precision
    "learning-rate": "--lr",
    "wd": "--weight-decay",
    "opt": "--optimizer",
    "optim": "--optimizer",
    "sched": "--schedule",
    "lr-scheduler": "--schedule",
    "lr-scheduler-type": "--schedule",
    "warmup-steps": "--warmup",
    "warmup-ratio": "--warmup 5%",
    "warmup-epochs": "--warmup 1epoch",
    "grad-clip": "--clip-norm",
    "clip-grad": "--clip-norm",
    "clip-grad-norm": "--clip-norm",
    "gradient-clip-val": "--clip-norm",
    "max-grad-norm": "--clip-norm",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "amp": "--precision auto",
    "mixed-precision": "--precision",
    "sync-bn": "--sync-batchnorm",
    "torch-compile": "--compile",
    "fsdp": "--strategy fsdp",
    # output of a run, and where it resumes from
    "output-dir": RUN_DIR,
    "save-dir": RUN_DIR,
    "log-dir": RUN_DIR,
    "resume-from-checkpoint": "--resume PATH",
    "pretrained": "--init-from",
    "eval-steps": "--eval-every",
    "eval-interval": "--eval-every",
    "save-steps": "--checkpoint-every",
    "save-interval": "--checkpoint-every",
    "save-total-limit": "--checkpoint-keep",
    "logging-steps": "--log-every",
    "log-interval": "--log-every",
    "print-freq": "--log-every",
    "report-to": "--tracker",
}


def tandem_flag_for(flag: str) -> str | None:
    """Return the tandem equivalent of another trainer's flag, with - or _ between its words."""
    # transformers spells its flags with underscores, and torchrun accepts both forms.
    return BROUGHT_ALONG.get(flag.lstrip("-").replace("_", "-"))
