"""The command line of a cluster: which options each action accepts, and its exit codes."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tandem.cluster import actions
from tandem.cluster.chaos import chaos, check_chaos
from tandem.cluster.engine import ClusterError, Wording, check_compose, check_engine, typed
from tandem.cluster.faults import FAULTS
from tandem.cluster.preflight import check_image, check_project, check_switch, checked_node, checked_nodes
from tandem.cluster.volume import check_get, get
from tandem.config import Parser
from tandem.errors import ConfigError, TandemError


class Action(NamedTuple):
    """What an action does, and how its options are checked before the engine is looked for."""

    run: Callable[[argparse.Namespace], int]
    check: Callable[[argparse.Namespace], object] = lambda options: None


ACTIONS: Mapping[str, Action] = {
    "up": Action(actions.up, actions.cluster_of),
    "down": Action(actions.down),
    "ps": Action(actions.ps),
    "logs": Action(actions.logs),
    "shell": Action(actions.shell, lambda options: checked_node(options.node)),
    "scale": Action(actions.scale, lambda options: checked_nodes(options.nodes)),
    "get": Action(get, check_get),
    "chaos": Action(chaos, check_chaos),
}
UP = ("up",)
OPTIONS: Mapping[str, tuple[Sequence[str], str, str]] = {
    "project": (tuple(ACTIONS), "NAME", "name of the Compose project"),
    "nodes": (("up", "scale"), "N", "number of nodes, one container each"),
    "spares": (UP, "N", "more containers, which wait to take the place of a lost node"),
    "task": (UP, "TASK", "a built-in task, or FILE.py:CLASS on this host"),
    "script": (UP, "FILE", "a script on this host instead of a task"),
    "script-args": (UP, "WORDS", "arguments of the script"),
    "args": (UP, "WORDS", "flags of `tandem launch`"),
    "epochs": (UP, "N", "epochs to train"),
    "run": (("up", "get"), "NAME", "the run's directory in the checkpoint volume"),
    "gpus": (UP, "N", "GPUs of this host per node, or all"),
    "rate": (UP, "RATE", "limit what each node sends, such as 100mbit"),
    "latency": (UP, "TIME", "delay what each node sends, such as 20ms"),
    "loss": (UP, "SHARE", "drop a share of what each node sends, such as 1%"),
    "metrics-port": (UP, "PORT", "metrics port on this host"),
    "image": (("up", "get", "chaos"), "NAME", "an existing image; up builds one without it"),
    "node": (("shell", "chaos"), "N", "a node, counted from 0"),
    "to": (("get",), "DIR", "a new directory on this host"),
}
"""{option: (the actions that accept it, its placeholder, its meaning)}"""
DEFAULTS = {("up", "nodes"): "2", ("scale", "nodes"): "2", ("shell", "node"): "0"}
SHOWN_DEFAULTS = {
    "project": "tandem", "nodes": "2", "spares": "0", "metrics-port": "19469",
    "node": "chaos: 1, shell: 0", "to": "runs/RUN",
}  # fmt: skip
SWITCHES = {
    "monitoring": ("up", "also start Prometheus and Grafana"),
    "volumes": ("down", "remove the volumes, with all checkpoints, as well"),
}


def add_options(parser: Parser) -> None:
    """Add the actions and all of their options; `completed` rejects those of other actions."""
    parser.add_argument("action", choices=tuple(ACTIONS), help="what to do with the cluster")
    text = f"chaos only: {', '.join(FAULTS)}, or all"
    parser.add_argument("fault", nargs="?", default="", metavar="FAULT", help=text)
    for name, (takers, placeholder, meaning) in OPTIONS.items():
        whose = "" if len(takers) == len(ACTIONS) else f"{', '.join(takers)}: "
        default = f" [default {SHOWN_DEFAULTS[name]}]" if name in SHOWN_DEFAULTS else ""
        # argparse formats the text with %.
        text = f"{whose}{meaning}{default}".replace("%", "%%")
        parser.add_argument(f"--{name}", metavar=placeholder, help=text)
    for name, (taker, meaning) in SWITCHES.items():
        # make passes 1 or an empty value, but users type the flag alone.
        parser.add_argument(f"--{name}", nargs="?", const="1", metavar="1", help=f"{taker}: {meaning}")


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults; an empty value counts as missing, because make passes it. Raises ConfigError."""
    action = options.action
    taken = [name for name, (takers, _, _) in OPTIONS.items() if action in takers]
    taken += [name for name, (taker, _) in SWITCHES.items() if action == taker]
    for name in (*OPTIONS, *SWITCHES):
        key = name.replace("-", "_")
        if getattr(options, key) and name not in taken:
            expected = ", ".join(f"--{each}" for each in taken)
            raise ConfigError(f"--{name} is not an option of `cluster {action}`; expected {expected}")
        if not getattr(options, key):
            setattr(options, key, DEFAULTS.get((action, name), ""))
    options.project = options.project or "tandem"
    if options.fault and action != "chaos":
        raise ConfigError(f"unexpected argument {options.fault!r}; only `cluster chaos` takes a fault")
    return options


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Raises ConfigError."""
    parser = Parser("cluster", "", "", takes_settings=False)
    add_options(parser)
    return completed(parser.read(words))


def run(options: argparse.Namespace) -> int:
    """Check one action's options, then the engine, and run it; messages name commands as the user types them.

    Raises TandemError.
    """
    signal.signal(signal.SIGTERM, stop_once)
    try:
        check_project(options.project)
        check_image(options.image)
        for name in SWITCHES:
            check_switch(name.upper(), getattr(options, name))
        action = ACTIONS[options.action]
        # Before the engine is queried, so that a typo is reported even without Docker.
        action.check(options)
        check_engine()
        check_compose()
        return action.run(options)
    except ClusterError as error:
        # The same error keeps its class, and with it the exit code.
        error.args = (typed(str(error)),)
        raise


def stop_once(number: int, frame: object) -> None:
    """Handle SIGTERM like the first Ctrl-C, so that the nodes are stopped and can save; ignore later ones.

    `make` passes the signal on, so this process gets it twice if its whole process group does.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_typed(options: argparse.Namespace) -> int:
    """Run the action of `tandem cluster` that the user typed. Raises TandemError."""
    Wording.is_make = False
    return run(completed(options))


def main(words: Sequence[str]) -> int:
    """Run the action of a make target; print one line and return 2 for a usage error."""
    try:
        return run(parsed(words))
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports Ctrl-C.
        return 130
