"""`python3 -m tandem.kubernetes VERB`: the targets of k8s/k8s.mk, which need no virtual environment."""

import argparse
import sys
from collections.abc import Sequence

from tandem.kubernetes import commands
from tandem.kubernetes.parameters import JOB, use_make_wording
from tandem.kubernetes.render import KIND, UsageError


def main(words: Sequence[str]) -> int:
    """Run one verb; print one line and return 2 if the selection or the cluster cannot be used."""
    parser = argparse.ArgumentParser(prog="tandem.kubernetes", description=__doc__)
    parser.add_argument("verb", choices=commands.VERBS)
    parser.add_argument("--overlay", default=KIND)
    parser.add_argument("--image", default="")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--name", default=JOB, help="the job's name: app.kubernetes.io/instance")
    parser.add_argument("--nodes", default="", help="the job's pods")
    parser.add_argument("--purge", action="store_true", help="delete the volume as well")
    given = parser.parse_args(words)
    use_make_wording()
    try:
        command = commands.K8sCommand(
            verb=given.verb,
            components=(given.overlay,),
            image=given.image,
            namespace=given.namespace,
            name=given.name,
            nodes=commands.nodes_of(given.nodes) if given.nodes else None,
            purge=given.purge,
        )
        return commands.run(command)
    except UsageError as error:
        print(f"tandem k8s: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports Ctrl-C.
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
