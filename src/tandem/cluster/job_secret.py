"""The secret that a Compose project's nodes share: a file on this host, recreated at each start.

Compose mounts it at /run/secrets/job. It is in no label, variable or log. Only its owner can access the
directory; the file itself is readable by the containers' user.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from tandem import shipped
from tandem.cluster.engine import ClusterError

GIVEN = "TANDEM_JOB_SECRET"
GIVEN_FILE = "TANDEM_JOB_SECRET_FILE"
ROOT = shipped.checkout()


def path_of(project: str) -> Path:
    """Return the file's path: below build/ of the checkout, else in the user's state directory."""
    if ROOT is not None:
        return ROOT / "build" / "secrets" / project
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "tandem" / "secrets" / project


def make(project: str, given: Mapping[str, str]) -> Path:
    """Write the file with the secret in `given` (variables), or a new one. Raises ClusterError."""
    file = given.get(GIVEN_FILE)
    try:
        text = Path(file).read_text(encoding="utf-8") if file else given.get(GIVEN) or secrets.token_hex(32)
    except (OSError, ValueError) as error:
        raise ClusterError(f"{GIVEN_FILE}: cannot read {file}: {error}; make it readable") from error
    path = path_of(project)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkdir changes no mode of an existing directory.
    path.parent.chmod(0o700)
    # An existing file may be a link or belong to another user, so the secret is written to a new one.
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o444)  # regardless of the umask
        out.write(text)
    return path


def remove(project: str) -> None:
    path_of(project).unlink(missing_ok=True)
