"""The command lines at the end of each verb's `--help`, ready to copy."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "launch": {
        "tandem launch --nodes 2 --epochs 2": "two simulated nodes on this machine",
        "tandem launch --task my_task.py:MyTask --batch-size 256 --lr 0.05": "your own task",
        "tandem launch --nproc 4 train.py --lr 0.05": "a torchrun script, unchanged",
    },
    "train": {
        "tandem train --epochs 1 --device cpu": "a single rank, without restarts",
        "torchrun --nproc-per-node 2 -m tandem train --run-dir runs/digits": "two ranks under torchrun",
    },
    "demo": {
        "tandem demo": "takes about 30 seconds",
        "tandem demo --run-dir runs/first": "choose the run directory",
    },
    "init": {
        "tandem init my-project": "create a new directory",
        "tandem init my-project --kubernetes trainjob": "for Kubeflow Trainer 2",
        "tandem init my-project --slurm": "with a batch script for Slurm",
    },
    "cluster": {
        "tandem cluster up --nodes 2 --epochs 2": "train on two containers; Ctrl-C saves and stops them",
        "tandem cluster chaos kill-node --node 1": "in a second terminal, while it trains",
        "tandem cluster get --run digits": "copy the run from its volume to runs/digits",
    },
    "checkpoints": {
        "tandem checkpoints ls runs/digits": "list steps, sizes and scores",
        "tandem checkpoints verify runs/digits": "check every byte against its SHA-256",
        "tandem checkpoints prune runs/digits --keep 1 --dry-run": "show what would be deleted",
    },
    "report": {
        "tandem report runs/digits": "runs/digits/report.html",
        "tandem report runs/a --compare runs/b --output both.html": "compare two runs in the same charts",
    },
    "page": {
        "tandem page": "all runs in ./runs, on port 19470",
        "tandem page runs/a runs/b --port 8000": "only these two",
    },
    "track": {
        "tandem track runs/digits": "to the tracker that the run was started with",
        "tandem track runs/digits --tracker mlflow": "to a different tracker",
    },
    "runs": {
        "tandem runs": "list the runs in ./runs",
        "tandem runs --json": "for scripts",
        "tandem runs --clean --dry-run": "show the empty runs that would be removed",
    },
    "kill": {
        "tandem kill runs/digits --rank 1": "SIGKILL: the rank is restarted and the run continues",
        "tandem kill runs/digits --node 1 --signal STOP": "simulate a node that hangs",
    },
    "eval": {
        "tandem eval runs/digits": "its newest checkpoint",
        "tandem eval runs/digits@500 --nproc 4 --json": "the checkpoint of step 500, on four ranks",
    },
    "export": {
        "tandem export runs/digits --output digits.safetensors": "the weights of its newest checkpoint",
        "tandem export runs/digits@500 --format torch": "digits-step-500.pt",
        "tandem export runs/digits --format onnx": "the model itself",
    },
    "verify-resume": {
        "tandem verify-resume --task my_task.py:MyTask --nproc 2": "your own task",
        "tandem verify-resume --nproc 2 train.py --lr 0.1": "a script with its own training loop",
    },
    "check": {
        "tandem check my_task.py": "the only task in that file",
        "tandem check my_task.py:MyTask --task.depth 4 --batch-size 64": "with a setting of the task",
    },
    "bench": {
        "tandem bench --steps 50": "all strategies",
        "tandem bench --compare single,ddp --task my_task.py:MyTask": "two of them",
        "tandem bench --nproc 2 --output bench.json": "also write a file",
    },
    "config": {
        "tandem config --explain": "show each value and where it comes from",
        "tandem config --lr 0.05 --epochs 8 > run.toml": "a file for `tandem launch --config run.toml`",
    },
    "doctor": {
        "tandem doctor": "this machine",
        "tandem doctor --nodes 2 --run-dir /shared/run --json": "as a node of a two-node job, as JSON",
    },
    "k8s": {
        "tandem k8s render --kind trainjob --with gpu,kueue": "print the manifest; needs no cluster",
        "tandem k8s apply --with gpu --image registry.example/team/tandem:1.0": "start a PyTorchJob",
        "tandem k8s forward --with gpu": "its live page on localhost:19469",
    },
    "completion": {
        "tandem completion bash > ~/.local/share/bash-completion/completions/tandem": "for bash",
        "tandem completion zsh > ~/.tandem.zsh": "then `source ~/.tandem.zsh` in ~/.zshrc",
    },
    "health": {
        "tandem health runs/digits": "check a run: exits with 1 if there is no progress",
        "TANDEM_STATE_DIR=/tmp/state tandem launch": "start a node that reports its health",
        "TANDEM_STATE_DIR=/tmp/state tandem health": "check this node, for a probe",
    },
}


def examples_of(verb: str) -> str | None:
    """Return the end of a verb's help: one command per line, followed by its purpose."""
    if verb not in EXAMPLES:
        return None
    lines = EXAMPLES[verb]
    width = max(map(len, lines))
    return "\n".join(["examples:", *(f"  {line:<{width}}  # {what}" for line, what in lines.items())])
