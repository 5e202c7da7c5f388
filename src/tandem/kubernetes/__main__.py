"""`python3 -m tandem.kubernetes VERB`: the targets of k8s/k8s.mk, which need no virtual environment."""

import argparse
import sys
from collections.abc import Sequence

from tandem.kubernetes import commands
from tandem.kubernetes.render import KIND, UsageError
from tandem.kubernetes.spoken import speak_make


def main(words: Sequence[str]) -> int:
    """Run one verb; print one line and return 2 if the selection or the cluster cannot be used."""
    parser = argparse.ArgumentParser(prog="tandem.kubernetes", description=__doc__)
    parser.add_argument("verb", choices=commands.VERBS)
    parser.add_argument("--overlay", default=KIND)
    parser.add_argument("--image", default="")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--run", default="tandem", help="the run's name: app.kubernetes.io/instance")
    parser.add_argument("--purge", action="store_true", help="delete the volume as well")
    given = parser.parse_args(words)
    speak_make()
    asked = commands.Asked(
        given.verb, "", (given.overlay,), given.image, given.namespace, given.run, given.purge
    )
    try:
        return commands.run(asked)
    except UsageError as error:
        print(f"tandem k8s: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
