"""Replacements for settings and values of earlier versions, and the conversion of old files."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["flag", "variable", "key", "setting"]


class Replacement(NamedTuple):
    """The replacement for a removed setting.

    `note`: has no period at the end. `name` and `value`: the setting to use, if there is one.
    """

    note: str = ""
    name: str = ""
    value: str = ""

    def words(self, kind: Kind) -> str:
        """Return a phrase in the form in which the removed name was given."""
        if not self.name:
            return self.note
        flag = f"--{self.name.replace('_', '-')} {self.value}".rstrip()
        forms = {
            "variable": f"TANDEM_{self.name.upper()}={self.value or 'true'}",
            "key": f"{self.name} = " + (f'"{self.value}"' if self.value else "true"),
        }
        return f"use {forms.get(kind, flag)}" + (f"; {self.note}" if self.note else "")


REMOVED: Mapping[str, Replacement] = {
    "run_mode": Replacement("a new run directory gets mode 700; to open it, type `chmod 750 RUN_DIR`"),
    "run_name": Replacement("the name of a run is its directory's name", "run_dir", "runs/NAME"),
    "dist_bn": Replacement("for statistics of the global batch", "sync_batchnorm"),
    "static_graph": Replacement("for parameters without a gradient", "find_unused"),
    "clip_value": Replacement("it limits the norm of all gradients", "clip_norm", "X"),
    "warmup_mode": Replacement("the warm-up is linear; for another one, write build_scheduler in the task"),
    "warmup_factor": Replacement("the warm-up is linear; for another one, write build_scheduler in the task"),
    "lr_base_batch_size": Replacement("", "lr_scaling", "linear:240"),
    "dp_first_share": Replacement("", "strategy", "dp:0.5"),
    "compile_mode": Replacement("", "compile", "MODE"),
    "powersgd_rank": Replacement("", "gradient_compression", "powersgd:RANK"),
    "init_method": Replacement("or file:///PATH; MASTER_ADDR needs no setting", "master", "HOST:PORT"),
    "connect_timeout": Replacement("it also limits the wait for nodes", "master_timeout", "SECONDS"),
    "first_step_timeout": Replacement("", "phase_timeout", "SECONDS"),
    "max_starts": Replacement("", "max_crash_loops", "N"),
    "cold": Replacement("", "fresh_interpreter"),
    "standby_gpu": Replacement("", "warm_gpu"),
    "init_min": Replacement("it requires all parameters", "init_strict"),
    "tensorboard": Replacement("with another tracker: tensorboard,mlflow", "tracker", "tensorboard"),
    "metrics_host": Replacement("", "metrics", "HOST:PORT"),
    "metrics_port": Replacement("", "metrics", "HOST:PORT"),
    "metrics_cert": Replacement("", "metrics_tls", "CERT,KEY"),
    "metrics_key": Replacement("", "metrics_tls", "CERT,KEY"),
    "elastic_settle": Replacement("remove it; an elastic job waits 10 s for more nodes than MIN"),
    "checkpoint_failures_allowed": Replacement(
        "remove it; a run fails after more than 3 failed saves in a row"
    ),
}
"""Keyed by the former name of the setting. Each row stays for one release."""
RENAMED = {
    "first_step_timeout": "phase_timeout",
    "max_starts": "max_crash_loops",
    "cold": "fresh_interpreter",
    "standby_gpu": "warm_gpu",
}
REMOVED_VALUES: Mapping[tuple[str, str], Replacement] = {
    ("lr_scaling", "auto"): Replacement("sqrt:BATCH for adam and adamw", "lr_scaling", "linear:BATCH"),
    ("on_nonfinite", "raise"): Replacement("it names the tensor", "on_nonfinite", "stop"),
    ("log_format", "auto"): Replacement("", "log_format", "text"),
    ("batch_shares", "auto"): Replacement("one number per rank", "batch_shares", "3:1"),
}
"""Keyed by the name of the setting and its former value."""
CHANGED_VALUES: Mapping[tuple[str, str], object] = {
    ("log_format", "auto"): "text",
    ("on_nonfinite", "raise"): "stop",
}
"""The current value for a removed value in an old file. A value without an entry becomes None."""


def removed_name_message(kind: Kind, name: str, label: str | None = None) -> str | None:
    """Return the error for a removed name, as it was typed; None if it was never a setting."""
    key = name.lower().removeprefix("tandem_").lstrip("-").replace("-", "_")
    # Switches had a second flag, --no-X, which was removed with them.
    row = REMOVED.get(key) or (REMOVED.get(key.removeprefix("no_")) if kind == "flag" else None)
    return row and f"{label or name}: this setting was removed; {row.words(kind)}"


def removed_value_message(label: str, name: str, text: str) -> str | None:
    """Return the error for a removed value; None for any other value."""
    row = REMOVED_VALUES.get((name, text))
    kind: Kind = "flag" if label.startswith("-") else "variable" if label.startswith("TANDEM_") else "key"
    return row and f"{label}: the value {text!r} was removed; {row.words(kind)}"


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings in a file of an earlier version to the names and values of this version.

    Settings without a counterpart are dropped, so they have no effect. Other values are unchanged.
    """
    # Removed names go first: each merge below adds the current name.
    new = {name: value for name, value in values.items() if name not in REMOVED}
    _merge_computing(values, new)
    _merge_places(values, new)
    new |= {new_name: values[name] for name, new_name in RENAMED.items() if name in values}
    for name, text in REMOVED_VALUES:
        if new.get(name) == text:
            new[name] = CHANGED_VALUES.get((name, text))
    return new


def _merge_computing(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    # 240 was the default of lr_base_batch_size.
    rule = old.get("lr_scaling")
    base = old.get("lr_base_batch_size", 240)
    if rule == "auto":
        # `auto` chose the rule by the optimizer. The new value names the rule.
        rule = "linear" if old.get("optimizer", "sgd") == "sgd" else "sqrt"
    if rule in ("linear", "sqrt"):
        new["lr_scaling"] = rule if base == 240 else f"{rule}:{base}"
    share = old.get("dp_first_share", 1)
    # An old config.json contains every setting, so a share may be there without effect.
    if share != 1 and old.get("strategy") == "dp":
        new["strategy"] = f"dp:{share}"
    if isinstance(old.get("compile"), bool):
        new["compile"] = old.get("compile_mode", "default") if old["compile"] else None
    rank = old.get("powersgd_rank", 4)
    # 4 was the default, which the current spelling leaves out.
    if rank != 4 and old.get("gradient_compression") == "powersgd":
        new["gradient_compression"] = f"powersgd:{rank}"


def _merge_places(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    method = old.get("init_method")
    # env:// meant MASTER_ADDR and MASTER_PORT, which need no setting.
    if method and method != "env://":
        new["master"] = method
    if old.get("init_min"):
        new["init_strict"] = True
    if old.get("tensorboard"):
        new["tracker"] = ",".join(["tensorboard", *([old["tracker"]] if old.get("tracker") else [])])
    if "metrics_host" in old or "metrics_port" in old:
        # These were the defaults. A file with only one of the two settings used the other's default.
        host = str(old.get("metrics_host", "127.0.0.1"))
        new["metrics"] = f"{f'[{host}]' if ':' in host else host}:{old.get('metrics_port', 9469)}"
    if old.get("metrics_cert"):
        new["metrics_tls"] = ",".join(
            str(old[name]) for name in ("metrics_cert", "metrics_key") if old.get(name)
        )


# Flags of other trainers and their tandem equivalents, for the "did you mean" of an error message.

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
