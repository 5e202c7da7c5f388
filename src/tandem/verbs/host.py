"""The verbs for this machine: its settings, its problems, its run's health, containers, data; and `k8s`.

Like `cli`, which collects the verbs, this module imports what it needs when a verb is called.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import FAILED, FINISHED
from tandem.verbs.verb import JSON, Environment, Verb, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser


def config(options: "Namespace", environ: Environment) -> int:
    """Print every setting, and with --explain where each value came from."""
    from tandem.config import as_json, as_toml, explain, markdown, resolve

    if options.markdown:
        print(markdown(), end="")
        return FINISHED
    loaded = resolve(options.given, environ)
    for note in loaded.notes:
        # Standard output is a file for --config, or JSON.
        print(f"tandem: {note}", file=sys.stderr)
    if options.json:
        print_json(as_json(loaded))
        return FINISHED
    print(explain(loaded) if options.explain else as_toml(loaded.settings, loaded.chosen).rstrip())
    return FINISHED


def _config_options(parser: "Parser") -> None:
    parser.option("--explain", bool, "show where each value comes from, instead of printing a --config file")
    parser.option("--json", bool, JSON)
    parser.option("--markdown", bool, "the tables of docs/configuration.md")


def doctor(options: "Namespace", environ: Environment) -> int:
    """Diagnose this machine, or test the nodes of a job; return 1 if a check fails, else 0."""
    from tandem.config import resolve

    if options.join:
        from tandem.launch.join_check import as_text, check_nodes
        from tandem.verify.machine import volume

        code, verdict = check_nodes(resolve(options.given, environ).settings, environ, volume)
        if options.json:
            print_json(verdict)
        else:
            print(as_text(verdict))
        return code
    from tandem.verify.doctor import diagnose

    found = diagnose(resolve(options.given, environ).settings, environ)
    if options.json:
        print_json(found.as_json())
    else:
        print(found.as_text())
    # A warning is no failure, because such a machine can train.
    return FAILED if found.state == "fail" else FINISHED


def _doctor_options(parser: "Parser") -> None:
    parser.option("--join", bool, "on every node of a job: test them together, and name those to leave out")
    parser.option("--json", bool, JSON)


def health(options: "Namespace | None", environ: Environment) -> int:
    """Judge the heartbeat of this node, or of the run in a directory; uses only the standard library."""
    # Without tandem.config, because a probe has a short timeout.
    from tandem.telemetry.health import main as health_main

    # Probes call this every few seconds, without a parser.
    if options is None:
        return health_main(environ)
    run_dir = options.run_dir
    if run_dir is not None and "://" in run_dir:  # an import that probes do without
        # The health file of a remote run is in the run's directory on this machine.
        from tandem.run.directory import RunDir

        run_dir = str(RunDir(run_dir).folder)
    return health_main(environ, options.json, run_dir)


def _health_options(parser: "Parser") -> None:
    text = "run directory; default: the node that writes to TANDEM_STATE_DIR"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help=text)
    parser.option("--json", bool, JSON)


def cluster(options: "Namespace", environ: Environment) -> int:
    """Run containers on this host; Compose reads their variables from the environment itself."""
    from tandem.cluster.command_line import run_typed

    return run_typed(options)


def _cluster_options(parser: "Parser") -> None:
    from tandem.cluster.command_line import add_options

    add_options(parser)


def index(options: "Namespace", environ: Environment) -> int:
    """Write the index of tar shards that `tandem.data.tar_blocks` reads."""
    from tandem.data.tar_index import index_shards
    from tandem.log import pluralize

    def progress(read: int) -> None:
        print(f"read {read} of {pluralize(len(options.shards), 'shard')}", file=sys.stderr)

    blocks = index_shards(options.shards, options.output, options.block_bytes, progress)
    samples = sum(block.samples for block in blocks)
    size = sum(block.length for block in blocks)
    numbers = (len(options.shards), "shard"), (len(blocks), "block"), (samples, "sample")
    print(f"{options.output}: {', '.join(pluralize(*each) for each in numbers)}, {size / 1e6:,.1f} MB")
    return FINISHED


def _index_options(parser: "Parser") -> None:
    from tandem.config import Count
    from tandem.data.tar_index import BLOCK_BYTES, BLOCK_SAMPLES

    text = "tar files of WebDataset: paths, or addresses with http://, https:// or s3://"
    parser.add_argument("shards", nargs="+", metavar="SHARD", help=text)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("index.jsonl"),
        metavar="FILE",
        help="file to write; default: index.jsonl",
    )
    text = f"end a block at the sample that reaches so many bytes, or at {BLOCK_SAMPLES} samples"
    parser.option("--block-bytes", Count, text, BLOCK_BYTES)


def k8s(options: "Namespace", environ: Environment) -> int:
    """Run kubectl with the rendered manifest; the exit code of `logs` is the job's."""
    from tandem.kubernetes import commands
    from tandem.kubernetes.render import KIND

    # The option can be repeated, and each value can be a list.
    parts = tuple(",".join(options.components).split(",")) if options.components else ()
    command = commands.K8sCommand(
        verb=options.action,
        # A kind may also be among the components, so the default must not add a second one.
        kind=options.kind or ("" if parts else KIND),
        components=parts,
        image=options.image,
        namespace=options.namespace,
        name=options.name,
        nodes=options.nodes,
        purge=options.purge,
        port=options.port,
    )
    return commands.run(command)


def _k8s_options(parser: "Parser") -> None:
    from argparse import SUPPRESS

    from tandem.config import Count
    from tandem.kubernetes.cluster import PORT
    from tandem.kubernetes.commands import KINDS, VERBS
    from tandem.kubernetes.parameters import JOB
    from tandem.kubernetes.render import KIND, ORDER

    text = (
        "render: print the manifest; apply: start the job; logs: follow its pods; status: job, pods, "
        "warnings; forward: live page and metrics on this machine; delete: remove the job"
    )
    parser.add_argument("action", choices=VERBS, help=text)
    parser.add_argument("--kind", choices=KINDS, default="", help=f"kind of job; default {KIND}")
    parser.add_argument(
        "--with",
        # `with` is a keyword of Python, so no attribute can have this name.
        dest="components",
        metavar="A,B",
        action="append",
        help=f"components, may be repeated: {', '.join(ORDER)}",
    )
    parser.add_argument(
        "--image", metavar="NAME", default="", help="NAME[:TAG][@sha256:DIGEST] instead of tandem:cuda"
    )
    parser.add_argument("--namespace", metavar="NAME", default="", help="default: the context's own")
    text = f"name of the job, of its run and of its objects; default {JOB}"
    parser.add_argument("--name", metavar="NAME", default=JOB, help=text)
    parser.add_argument("--run", dest="name", default=SUPPRESS, help=SUPPRESS)  # its older spelling
    # The default is only in the text. A value would look as if it had been typed, and most verbs reject the
    # option.
    parser.option("--nodes", Count, "nodes (pods) of the job for render and apply; default 3")
    parser.option("--purge", bool, "delete also removes the volume with the checkpoints")
    parser.option("--port", Count, "local port for forward", PORT)


VERBS: Mapping[str, Verb] = {
    "cluster": Verb(
        cluster,
        "up|down|ps|logs|shell|scale|get|chaos",
        "train on containers of this host (Docker Compose)",
        _cluster_options,
    ),
    "config": Verb(
        config,
        "[--explain | --json] [settings]",
        "print every setting, its value and its source",
        _config_options,
    ),
    "doctor": Verb(
        doctor,
        "[--join] [--json] [settings]",
        "check this machine: names, ports, volume, clock, versions, GPUs",
        _doctor_options,
    ),
    "health": Verb(health, "[RUN_DIR] [--json]", "check whether a run makes progress", _health_options),
    "index": Verb(
        index,
        "SHARD... [--output FILE] [--block-bytes N]",
        "index tar shards, for data on object stores",
        _index_options,
    ),
    "k8s": Verb(
        k8s,
        "render|apply|logs|status|forward|delete [--kind KIND] [--with A,B]",
        "run a job on Kubernetes (needs kubectl)",
        _k8s_options,
    ),
}
