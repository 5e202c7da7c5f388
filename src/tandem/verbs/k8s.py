"""The verb `k8s`: render the manifests, and apply, follow, inspect and delete a job.

Like `cli`, which collects the verbs, this module imports what it needs when a verb is called.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem.verbs.verb import Environment, Verb

if TYPE_CHECKING:
    from argparse import Namespace

    from tandem.config import Parser


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


def k8s_options(parser: "Parser") -> None:
    from argparse import SUPPRESS

    from tandem.config import Count
    from tandem.kubernetes.commands import KINDS, VERBS
    from tandem.kubernetes.following import PORT
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
    "k8s": Verb(
        k8s,
        "render|apply|logs|status|forward|delete [--kind KIND] [--with A,B]",
        "run a job on Kubernetes (needs kubectl)",
        k8s_options,
        takes_settings=False,
    ),
}
