"""The command lines at the end of each verb's `--help`, to be copied as they are."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "launch": {
        "tandem launch --nodes 2 --epochs 2": "two nodes, played by this machine",
        "tandem launch --task my_task.py:MyTask --batch-size 256 --lr 0.05": "a task of one's own",
        "tandem launch --nproc 4 train.py --lr 0.05": "a script, as torchrun runs it",
    },
    "train": {
        "tandem train --epochs 1 --device cpu": "one rank, without an agent",
        "torchrun --nproc-per-node 2 -m tandem train --run-dir runs/digits": "ranks of torchrun",
    },
    "init": {
        "tandem init my-project": "a new folder",
        "tandem init .": "this one, if it has none of these files",
    },
    "checkpoints": {
        "tandem checkpoints ls runs/digits": "steps, sizes and scores",
        "tandem checkpoints verify runs/digits": "read every byte of them",
        "tandem checkpoints prune runs/digits --keep 1 --dry-run": "what would go",
    },
    "report": {
        "tandem report runs/digits": "runs/digits/report.html",
        "tandem report runs/a --compare runs/b --output both.html": "two runs in one set of charts",
    },
    "page": {
        "tandem page": "all runs in ./runs, on port 9469",
        "tandem page runs/a runs/b --port 8000": "these two",
    },
    "track": {
        "tandem track runs/digits": "to the tracker that the run was begun with",
        "tandem track runs/digits --tracker mlflow": "to another one",
    },
    "runs": {
        "tandem runs": "those in ./runs",
        "tandem runs --clean --dry-run": "which ones left nothing and would be removed",
    },
    "kill": {
        "tandem kill runs/digits --rank 1": "SIGKILL: it is started again, and the run goes on",
        "tandem kill runs/digits --node 1 --signal STOP": "a node that hangs",
    },
    "eval": {
        "tandem eval runs/digits": "its newest checkpoint",
        "tandem eval runs/digits@500 --nproc 4 --json": "that of step 500, by four ranks",
    },
    "export": {
        "tandem export runs/digits --output digits.safetensors": "the weights of its newest checkpoint",
        "tandem export runs/digits@500 --format torch": "digits-step-500.pt",
        "tandem export runs/digits --format onnx": "the model itself",
    },
    "verify-resume": {
        "tandem verify-resume --task my_task.py:MyTask --nproc 2": "a task of one's own",
        "tandem verify-resume --script train.py --trials 1": "a script with a loop of its own",
    },
    "check": {
        "tandem check my_task.py": "the only task of that file",
        "tandem check my_task.py:MyTask --task.depth 4 --batch-size 64": "with a field of its own",
    },
    "bench": {
        "tandem bench --steps 50": "all strategies",
        "tandem bench --compare single,ddp --task my_task.py:MyTask": "two of them",
    },
    "config": {
        "tandem config --explain": "every value, and where it comes from",
        "tandem config --lr 0.05 --epochs 8 > run.toml": "a file for `tandem launch --config run.toml`",
    },
    "doctor": {
        "tandem doctor": "this machine",
        "tandem doctor --nodes 2 --run-dir /shared/run --json": "as a node of such a job, for a program",
    },
    "completion": {
        "tandem completion bash > ~/.local/share/bash-completion/completions/tandem": "for bash",
        "tandem completion zsh > ~/.tandem.zsh": "then `source ~/.tandem.zsh` in ~/.zshrc",
    },
    "health": {
        "TANDEM_STATE_DIR=/tmp/state tandem launch": "a node that says how it is",
        "TANDEM_STATE_DIR=/tmp/state tandem health": "beside it: ends with 1 where it makes no progress",
    },
}


def examples_of(verb: str) -> str | None:
    """The end of a verb's help: a command to a line, and behind it what it does."""
    if verb not in EXAMPLES:
        return None
    lines = EXAMPLES[verb]
    width = max(map(len, lines))
    return "\n".join(["examples:", *(f"  {line:<{width}}  # {what}" for line, what in lines.items())])
