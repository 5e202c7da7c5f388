"""The command line: one parser per verb, built from the settings it reads and from its own options.

It uses argparse instead of pydantic-settings, which takes 0.3 s to import, suggests no nearest match, and
reads the environment.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.config.fields import Setting, convert, placeholder, plain, words_of
from tandem.config.removed import removed_name_message, tandem_flag_for
from tandem.config.settings import SEE, SETTINGS, SLICES, unknown
from tandem.config.sources import CONFIG_HELP, CONFIG_VALID, PREFIX, TASK_VALID, Given, task_key
from tandem.errors import ConfigError
from tandem.text import did_you_mean, nearest

# The command lines at the end of each verb's `--help`, ready to copy.

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
        "tandem runs runs/digits --goodput": "where its wall time went",
        "tandem runs --clean --dry-run": "show the empty runs that would be removed",
    },
    "stacks": {
        "tandem stacks runs/digits": "the main thread of every rank",
        "kubectl exec POD -- tandem stacks /runs/digits --all-threads": "POD is node 0's",
    },
    "profile": {
        "tandem profile runs/digits": "the next 5 steps; open the file in https://ui.perfetto.dev",
        "tandem profile runs/digits --steps 20": "the next 20 steps",
    },
    "memory": {
        "tandem memory runs/digits": "allocations of the next 3 seconds, and all tensors",
        "tandem memory runs/digits --seconds 30": "what grows slowly",
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
        "tandem verify-resume --kills 5 -- python train.py --lr 0.1": "any program, without tandem",
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
        "srun tandem doctor --join --run-dir /shared/run": "all nodes of a Slurm job, together",
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
    "index": {
        "tandem index shards/*.tar --output shards/index.jsonl": "shards on this machine",
        "tandem index s3://bucket/train-{000..199}.tar": "200 shards; the shell expands the numbers",
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


_TRAINING = (
    "task", "task_fields", "steps", "seed", "data", "optimization", "compute", "exchange",
    "reliability", "evaluation", "snapshot_every", "init_from", "init_strict",
)  # fmt: skip
READS: Mapping[str, Sequence[str]] = {
    "eval": (
        "task", "task_fields", "seed", "data", "compute", "evaluation", "phase_timeout",
        "master_timeout", "nodes", "node_rank", "master", "nproc", "log_format",
    ),
    "export": ("task", "task_fields", "seed", "data", "devices_per_rank"),
    "check": tuple(name for name in _TRAINING if name != "compute")
    + ("strategy", "sync_batchnorm", "precision", "deterministic", "compile", "threads"),
    "verify-resume": (*_TRAINING, "launch", "checkpoint"),
    "bench": (*_TRAINING, "nproc"),
    "doctor": (
        "run_dir", "data_dir", "workers", "device", "nodes", "node_rank", "master", "nproc",
        "elastic", "spares", "master_timeout", "shutdown_timeout",
    ),
}  # fmt: skip
"""The groups and settings that a verb reads and lists in its help. A verb without an entry reads all."""
STRICT = ("eval", "export")
"""Verbs that reject the flags of settings they do not read. Other verbs accept all flags of a launch."""
COMMON: Mapping[str, Sequence[str]] = {
    "launch": (
        "task", "run_dir", "nodes", "nproc", "master", "epochs", "batch_size", "lr", "precision", "strategy",
        "resume", "max_restarts",
    ),
    "train": (
        "task", "run_dir", "data_dir", "epochs", "steps", "batch_size", "lr", "optimizer", "precision",
        "device", "checkpoint_every", "resume",
    ),
    "export": ("task", "data_dir"),
    "eval": ("task", "data_dir", "batch_size", "eval_batch_size", "device", "precision", "nproc"),
    "check": ("task", "data_dir", "batch_size", "lr", "precision", "strategy"),
    "verify-resume": ("task", "data_dir", "steps", "batch_size", "lr", "device", "precision", "nproc"),
    "bench": ("task", "data_dir", "steps", "batch_size", "lr", "device", "precision", "nproc"),
    "doctor": ("run_dir", "data_dir", "nodes", "nproc", "master", "device"),
}  # fmt: skip
"""The settings listed by `tandem VERB -h`; FEW for verbs without an entry."""
FEW = ("task", "data_dir", "epochs", "batch_size", "lr", "device", "precision", "nproc")
ALSO = "\nIt also takes the other settings of `tandem launch`, so that you can reuse a command line."
FLAGS = {
    flag
    for each in SETTINGS.values()
    for flag in (each.flag, *(["--no-" + each.flag[2:]] if each.is_switch else []))
}


def read_by(verb: str) -> list[str]:
    """Return the names of the settings that a verb reads."""
    if verb not in READS:
        return list(SETTINGS)
    return [name for name, each in SETTINGS.items() if {name, each.slice} & set(READS[verb])]


class Parser(argparse.ArgumentParser):
    """The argument parser of one verb. Errors are one-line ConfigErrors that name the nearest known flag."""

    def __init__(
        self, verb: str, usage: str, summary: str, takes_settings: bool = True, is_short: bool = False
    ) -> None:
        """`is_short`: for `-h`, which lists only the common settings."""
        also = "" if verb in STRICT or verb not in READS else ALSO
        super().__init__(
            prog=f"tandem {verb}",
            usage=f"tandem {verb} {usage}" if takes_settings else None,
            description=summary + also,
            epilog=examples_of(verb),
            formatter_class=_Lines,
            # A new setting would make an abbreviation ambiguous that a user's scripts rely on.
            allow_abbrev=False,
            add_help=False,
            exit_on_error=False,
        )
        self._verb = verb
        self._takes_settings = takes_settings
        self._help = f"See `tandem {verb} --help`"
        self._see = SEE if takes_settings else self._help
        self._valid: dict[str, str] = {}
        if takes_settings and is_short:
            self._add_common(COMMON.get(verb, FEW))
        elif takes_settings:
            self._add_settings()

    def option(self, flag: str, annotation: Any, help_text: str, default: object = None) -> None:
        """Add an option of the verb itself, validated like a setting; with type bool it is a switch."""
        if annotation is bool:
            self.add_argument(flag, action="store_true", help=_escaped(help_text))
            return
        # An option's valid values are kept for `_mistake`, which gets only the flag from argparse.
        self._valid[flag] = words_of(annotation)
        text = f"{help_text}\n[{'' if default is None else f'default {default}; '}{words_of(annotation)}]"
        read = _reader(annotation)
        self.add_argument(
            flag, type=read, default=default, metavar=placeholder(words_of(annotation)), help=_escaped(text)
        )

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words; settings are in `given`, as text. Raises ConfigError."""
        if self._takes_settings:
            # Any --task.NAME is accepted, because only the task knows its own settings.
            for flag in sorted({word.partition("=")[0] for word in words}):
                key = task_key(flag, "--task.")
                if key is not None and flag not in self._option_string_actions:
                    self._keep(flag, key, TASK_VALID)
        try:
            # parse_args would report unknown flags itself, without the nearest match.
            found, rest = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            raise self._mistake(str(error.argument_name), error.message) from None
        if rest and rest[0].startswith("-"):
            flag = rest[0].partition("=")[0]
            if self._takes_settings and (gone := removed_name_message("flag", flag)):
                raise ConfigError(gone)
            # A setting that a strict verb does not read is not a typo, so the nearest match would mislead.
            if self._takes_settings and flag in FLAGS:
                raise ConfigError(f"{flag} has no effect on `{self.prog}`; remove it. {self._help}")
            suggestion = tandem_flag_for(flag) if self._takes_settings else None
            raise unknown("flag", flag, self._option_string_actions, see=self._see, suggestion=suggestion)
        if rest:
            hint = "; settings are flags such as --epochs 4" if self._takes_settings else ""
            if rest[0].endswith(".py"):
                hint = f"; for a script: `tandem launch {rest[0]}`; for a task: --task {rest[0]}:CLASS"
            # A user may expect that --json takes a file, which argparse would call an unexpected argument.
            if "--json" in words and words[list(words).index("--json") + 1 :][:1] == rest[:1]:
                raise ConfigError(self._switch("--json", rest[0]))
            raise ConfigError(f"unexpected argument {rest[0]!r}{hint}. {self._see}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message, for example about a missing argument, as a ConfigError."""
        raise ConfigError(f"{message}. {self._help}")

    def _switch(self, flag: str, value: str) -> str:
        """Return the error message for a value after a switch."""
        to_file = f"--output {value}" if "--output" in self._option_string_actions else f"> {value}"
        more = f"; to write a file use {to_file}" if flag == "--json" else ""
        return f"{flag}: unexpected value {value!r}; this flag takes no value{more}. {self._help}"

    def _add_settings(self) -> None:
        self.set_defaults(given={})
        reads = read_by(self._verb)
        for slice_name, model in SLICES.items():
            group = self.add_argument_group(str(model.__doc__))
            for setting in SETTINGS.values():
                if setting.slice == slice_name and (setting.name in reads or self._verb not in STRICT):
                    self._add_setting(setting, group, setting.name in reads)
        file_help = f"{CONFIG_HELP}\n[{CONFIG_VALID}; {PREFIX}CONFIG]"
        self._keep(
            "--config",
            "config",
            CONFIG_VALID,
            self.add_argument_group("File"),
            help=file_help,
            metavar="PATH",
        )

    def _add_common(self, names: Sequence[str]) -> None:
        self.set_defaults(given={})
        more = f"all settings: `{self.prog} --help`; one setting: `tandem help NAME`"
        group = self.add_argument_group(f"Common settings ({more})")
        for setting in map(SETTINGS.__getitem__, names):
            default = plain(setting.default)
            text = setting.description + (f" [default {default}]" if default not in ("", "none") else "")
            metavar = {"nargs": 0} if setting.is_switch else {"metavar": setting.placeholder}
            self._keep(setting.flag, setting.name, setting.valid, group, help=_escaped(text), **metavar)

    def _add_setting(self, setting: Setting, group: Any, is_listed: bool) -> None:
        default = plain(setting.default)
        facts = [f"default {default}"] if default else []
        text = f"{setting.description}\n[{'; '.join([*facts, setting.valid, setting.variable])}]"
        switch: dict[str, Any] = {"metavar": setting.placeholder}
        if setting.is_switch:
            metavar = "true|false" if setting.annotation is bool else "MODE"
            switch = {"nargs": "?", "const": setting.bare, "metavar": metavar}
        # This key only reserves `--task.NAME` in the help; `read` adds the flags that are typed.
        key = "task.NAME" if setting.is_table else setting.name
        listed = _escaped(text) if is_listed else argparse.SUPPRESS
        self._keep(setting.flag, key, setting.valid, group, help=listed, **switch)
        if setting.is_switch:
            self._keep("--no-" + setting.flag[2:], key, "", group, nargs=0, const="false")

    def _keep(self, flag: str, key: str, valid: str, group: Any = None, **more: Any) -> None:
        self._valid[flag] = valid
        # SUPPRESS: `given` alone says what was typed, so no flag gets an attribute with a default.
        more = {"metavar": "VALUE", "help": argparse.SUPPRESS} | more
        (group or self).add_argument(flag, action=_Keep, dest=key, default=argparse.SUPPRESS, **more)

    def _mistake(self, flag: str, message: str) -> ConfigError:
        # `config --explain` shows settings, not the options of a verb.
        see = self._see if flag in FLAGS else self._help
        # argparse has no error codes, so its messages are recognized by their text.
        if message.startswith("expected one argument"):
            expected = self._valid.get(flag, "text")
            return ConfigError(f"{flag}: missing value; expected {expected}. {see}")
        if message.startswith("ignored explicit argument "):
            return ConfigError(self._switch(flag, message.removeprefix("ignored explicit argument ")[1:-1]))
        if choice := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            names = re.findall(r"[\w-]+", choice[2])
            # `tandem checkpoints RUN_DIR`, as most verbs take a run
            is_run = "ls" in names and Path(choice[1]).exists()
            meant = f"`{self.prog} ls {choice[1]}`" if is_run else nearest(choice[1], names)
            message += did_you_mean(meant, ".")
            return ConfigError(f"{flag}: {message} {self._help}")
        return ConfigError(f"{flag}: {message}. {see}")


class _Keep(argparse.Action):
    """Stores the text of a flag and its spelling, and leaves conversion to `sources`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = str(option_string)
        text = str(self.const if self.nargs == 0 else values)
        namespace.given[self.dest] = Given(text, f"flag {flag}", flag)


class _Lines(argparse.HelpFormatter):
    """A help formatter that keeps line breaks in the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in super(_Lines, self)._split_lines(line, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep examples unchanged: a command that is broken into lines cannot be copied."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _escaped(text: str) -> str:
    # argparse expands % in help texts.
    return text.replace("%", "%%")


def _reader(annotation: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return convert(annotation, text)
        except ValueError:
            expected = words_of(annotation)
            raise argparse.ArgumentTypeError(f"invalid value {text!r}; expected {expected}") from None

    return read


def as_flags(given: Mapping[str, Given]) -> list[str]:
    """Return the given settings as arguments for another tandem process."""
    # One word per flag: a value that begins with a dash would otherwise be read as a flag.
    return [f"--{key.replace('_', '-')}={value.text}" for key, value in given.items()]
