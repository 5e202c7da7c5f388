"""`python -m tandem_k8s VERB`: check the manifests, generate derived files, run a trial cluster."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.kubernetes.parameters import use_make_wording
from tandem.kubernetes.render import UsageError, render

WRONG = 2


def main(arguments: Sequence[str]) -> int:
    """Run one verb; print one line and return 2 if something must be fixed first."""
    parser = argparse.ArgumentParser(prog="tandem_k8s", description=__doc__)
    parser.add_argument("verb", choices=("validate", "generate", "try", "release"))
    parser.add_argument("--image", default="")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="for release: a folder")
    parser.add_argument("files", nargs="*", type=Path, help="for validate: manifests; default: the project's")
    given = parser.parse_args(arguments)
    use_make_wording()
    try:
        return _run(given)
    except UsageError as error:
        print(f"tandem k8s: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130


def _run(given: argparse.Namespace) -> int:
    if given.verb == "validate":
        return validate(given.files)
    if given.verb == "try":
        from tandem_k8s import trial

        return trial.try_it(given.image)
    if given.verb == "release":
        from tandem_k8s.release import write as write_release

        print("\n".join(f"wrote {path}" for path in write_release(given.image, given.output)))
        return 0
    from tandem_k8s.generate import write

    print("\n".join(f"wrote {path}" for path in write()))
    return 0


def validate(files: Sequence[Path]) -> int:
    """Check the files, or every manifest and overlay of the project; 1 if there is any problem."""
    from tandem_k8s.documents import MANIFESTS, OVERLAYS
    from tandem_k8s.validate import problems_of

    texts = {str(path): _text(path) for path in files}
    texts = texts or {name: render(name) for name in (*MANIFESTS, *OVERLAYS)}
    failed = 0
    for name, text in texts.items():
        found = problems_of(text)
        print(f"{name}: {'good' if not found else ''}".rstrip())
        print("".join(f"  {line}\n" for line in found), end="")
        failed += bool(found)
    return 1 if failed else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
