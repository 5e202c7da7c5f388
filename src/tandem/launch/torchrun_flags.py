"""Accept torchrun's flags in `tandem launch`, so that only the first word of a command changes.

The flags are those of torch.distributed.run in torch 2.15. Both spellings work (`--nproc-per-node`,
`--nproc_per_node`). Flags that tandem also has under the same name (`--max-restarts`) keep tandem's meaning.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from tandem.config.removed import TORCHRUN
from tandem.errors import ConfigError
from tandem.launch.program_arguments import SEE, TORCHRUN_SWITCHES, takes_next
from tandem.launch.this_machine import addresses_of, is_local

RENDEZVOUS_PORT = "29400"
MASTER_PORT = "29500"
"""torchrun's default ports for `--rdzv-endpoint` and `--master-port`."""
SHORT = {"-r": "--redirects", "-t": "--tee"}
SAME = ("--node-rank", "--max-restarts", "--numa-binding", "--shutdown-timeout")
SILENT = ("--rdzv-id", "--role", "--monitor-interval")
"""Dropped silently: a script cannot tell the difference."""
OUTPUT = "--log-dir --redirects --tee --local-ranks-filter --logs-specs"
OUTPUT += " --log-line-prefix-template --duplicate-stdout-filters --duplicate-stderr-filters"
OTHERS = "--rdzv-conf --local-addr --start-method --event-log-handler --signals-to-handle"
NO_EFFECT = dict.fromkeys(OUTPUT.split(), "; RUN_DIR/log contains the output of every rank")
NO_EFFECT |= dict.fromkeys(OTHERS.split(), "")
BACKENDS = ("c10d", "static")


def translated(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Translate torchrun's flags among the `words` after `tandem launch` into tandem's.

    A flag without an equivalent is dropped with one line on stderr. Raises ConfigError for an unsupported
    rendezvous backend, a missing value, and an unknown node rank.
    """
    ours, theirs, program = _split_flags(words)
    if not theirs:
        return list(words)
    for flag in theirs:
        if flag in NO_EFFECT:
            print(f"tandem: {flag} has no effect under tandem{NO_EFFECT[flag]}", file=sys.stderr)
    return [*ours, *_nodes(theirs, ours, environ), *_ranks(theirs), *program]


def _split_flags(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return (tandem's words, torchrun's {flag: value}, the program with its arguments)."""
    ours = list[str]()
    theirs = dict[str, str]()
    index = 0
    while index < len(words) and (words[index].startswith("-") and words[index] not in ("-m", "--")):
        word = words[index]
        name, is_joined, value = word.partition("=")
        flag = SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)
        index += 1
        if flag in TORCHRUN_SWITCHES:
            theirs[flag] = ""
        elif flag in TORCHRUN or flag in SILENT or flag in NO_EFFECT:
            if not is_joined and index == len(words):
                raise ConfigError(f"{flag} needs a value. {SEE}")
            theirs[flag] = value if is_joined else words[index]
            # The value is a separate word unless it follows a "=".
            index += not is_joined
        else:
            # Flags that only tandem has stay as typed, so that an error quotes what the user wrote.
            known = flag if flag in SAME else name
            following = words[index : index + 1]
            taken = following if not is_joined and takes_next(known, following) else []
            ours += [f"{known}={value}" if is_joined else known, *taken]
            index += len(taken)
    program = list(words[index:])
    if program and program[0] not in ("-m", "--"):
        # torchrun's switches may precede other flags; tandem's `-m` and `--` come right before the program.
        program[:0] = ["-m"] if "--module" in theirs else ["--"] if "--no-python" in theirs else []
    return ours, theirs, program


def _nodes(theirs: Mapping[str, str], ours: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    backend = theirs.get("--rdzv-backend", "c10d")
    if backend not in BACKENDS:
        raise ConfigError(
            f"--rdzv-backend: unsupported value {backend!r}; expected {' or '.join(BACKENDS)}, "
            "with --rdzv-endpoint HOST:PORT"
        )
    asked = "1" if "--standalone" in theirs else theirs.get("--nnodes", "")
    fewest, _, most = asked.partition(":")
    most = most or fewest
    words = ["--nodes", most] if most else []
    if fewest != most:
        words += ["--elastic", asked]
    where = _master(theirs)
    if most in ("", "1") or where is None:
        return words
    words += ["--master", where]
    has_rank = any(word.partition("=")[0] == "--node-rank" for word in ours)
    if not has_rank and not _is_placed(environ):
        words += ["--node-rank", str(_node_rank(where, most))]
    return words


def _master(theirs: Mapping[str, str]) -> str | None:
    """Return the rendezvous address, HOST:PORT, if the flags contain one."""
    if endpoint := theirs.get("--rdzv-endpoint"):
        return endpoint if endpoint.rpartition(":")[2].isdigit() else f"{endpoint}:{RENDEZVOUS_PORT}"
    if "--master-addr" in theirs or "--master-port" in theirs:
        host = theirs.get("--master-addr", "127.0.0.1")
        port = theirs.get("--master-port", MASTER_PORT)
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    return None


def _ranks(theirs: Mapping[str, str]) -> list[str]:
    number = theirs.get("--nproc-per-node")
    if number is None:
        return []
    if number == "cpu":
        return ["--nproc", str(os.cpu_count() or 1)]
    return ["--nproc", "auto" if number in ("gpu", "xpu") else number]


def _is_placed(environ: Mapping[str, str]) -> bool:
    """Return whether the environment contains this node's rank."""
    from tandem.platforms import by_hand, laptop
    from tandem.platforms.detection import of_this_process, platforms

    environ = of_this_process(environ)
    platform = next(each for each in platforms() if each.detect(environ))
    return "NODE_RANK" in environ or platform not in (by_hand, laptop)


def _node_rank(where: str, nodes: str) -> int:
    """Return the rank of this node: the host of the endpoint is node 0.

    torchrun ranks nodes as they arrive.
    """
    host = where.rpartition(":")[0].strip("[]")
    if any(map(is_local, addresses_of(host))):
        return 0
    if nodes == "2":
        return 1
    raise ConfigError(
        f"--nnodes {nodes}: cannot tell which node this is; add --node-rank N on each node (0 on {host})"
    )
