"""`python -m tandem_k8s VERB`: what the targets of k8s/k8s.mk call."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem_k8s.render import UsageError, render

WRONG = 2


def main(arguments: Sequence[str]) -> int:
    """Run one verb; 2 and one line on standard error when something has to be put right first."""
    parser = argparse.ArgumentParser(prog="tandem_k8s", description=__doc__)
    parser.add_argument(
        "verb", choices=("render", "validate", "generate", "apply", "logs", "status", "delete", "try")
    )
    parser.add_argument("--overlay", default="pytorchjob")
    parser.add_argument("--image", default="")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--run", default="tandem", help="the run's name: app.kubernetes.io/instance")
    parser.add_argument("--purge", action="store_true", help="delete the volume as well")
    parser.add_argument("files", nargs="*", type=Path, help="for validate: manifests; without, the project's")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except UsageError as error:
        print(f"tandem k8s: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130


def _run(given: argparse.Namespace) -> int:
    if given.verb == "render":
        sys.stdout.write(render(given.overlay, given.image))
        return 0
    if given.verb == "validate":
        return validate(given.files)
    if given.verb == "generate":
        from tandem_k8s.generate import write

        print("\n".join(f"wrote {path}" for path in write()))
        return 0
    from tandem_k8s import cluster, following, trial

    if given.verb == "try":
        return trial.try_it(given.image)
    target = cluster.Target(render(given.overlay, given.image), given.namespace, given.run)
    if given.verb == "delete":
        return cluster.delete(target, given.purge)
    return {"apply": cluster.apply, "logs": following.logs, "status": cluster.status}[given.verb](target)


def validate(files: Sequence[Path]) -> int:
    """Check the files, or every manifest and overlay of the project; 1 when there is any problem."""
    from tandem_k8s.documents import MANIFESTS, OVERLAYS, load
    from tandem_k8s.validate import problems

    texts = {str(path): path.read_text(encoding="utf-8") for path in files}
    texts = texts or {name: render(name) for name in (*MANIFESTS, *OVERLAYS)}
    failed = 0
    for name, text in texts.items():
        found = problems(load(text))
        print(f"{name}: {'good' if not found else ''}".rstrip())
        print("".join(f"  {line}\n" for line in found), end="")
        failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
