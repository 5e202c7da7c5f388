"""Write the manifests of a release: each kind, with the image's digest."""

import re
from pathlib import Path

from tandem.kubernetes.render import FOLDERS, UsageError, render


def write(image: str, folder: Path) -> list[Path]:
    """Write `tandem-KIND.yaml` for every kind into `folder`. Raises UsageError if `image` has no digest."""
    if not re.search(r"@sha256:[0-9a-f]{64}$", image):
        raise UsageError(f"IMAGE={image!r} has no digest; give NAME[:TAG]@sha256:DIGEST")
    texts = {folder / f"tandem-{kind}.yaml": render(kind, image) for kind in FOLDERS}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
