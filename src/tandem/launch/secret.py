"""Read the secret of a job: a variable or a file, the same on all nodes.

Either may be in .env, which is read only if the environment has neither.
"""

import ctypes
import hmac
import os
from collections.abc import MutableMapping
from pathlib import Path

from tandem.config.address import Webhook
from tandem.config.sources import DOTENV, dotenv_variables
from tandem.errors import ConfigError
from tandem.process import stat_of

SECRET = "TANDEM_JOB_SECRET"
SECRET_FILE = "TANDEM_JOB_SECRET_FILE"
SHORTEST_SECRET = 16
LONGEST_SECRET = 4096
LONGEST_BLOCK = 8 * 1024 * 1024
"""More than the kernel accepts for the arguments and variables of a process (execve(2))."""


def take_key(environ: MutableMapping[str, str]) -> bytes | None:
    """Derive the key from the job's secret and remove the secret from `environ`; None if there is no secret.

    Raises ConfigError.
    """
    if environ is os.environ:
        _wipe(SECRET)
    text = environ.pop(SECRET, "")
    file = environ.pop(SECRET_FILE, "")
    if not text and not file:
        variables = dotenv_variables(DOTENV)
        text = variables.get(SECRET) or ""
        file = variables.get(SECRET_FILE) or ""
    if text and file:
        raise ConfigError(f"{SECRET} and {SECRET_FILE} are both set; set only one of them")
    if not text and not file:
        return None
    if file:
        try:
            with Path(file).open(encoding="utf-8") as opened:
                # The path may be an endless device. One extra character shows that a secret is too long.
                text = opened.read(LONGEST_SECRET + 1)
        except OSError as error:
            raise ConfigError(
                f"{SECRET_FILE}: cannot read {file}: {error.strerror}; make it readable"
            ) from error
        except ValueError:
            raise ConfigError(
                f"{SECRET_FILE}: {file} is not a text file; create it with: openssl rand -hex 32"
            ) from None
    # Editors and echo end a file with a newline, which the variable on another node may not have.
    text = text.strip()
    if not SHORTEST_SECRET <= len(text) <= LONGEST_SECRET:
        raise ConfigError(
            f"the job secret has {len(text)} characters; expected {SHORTEST_SECRET} to {LONGEST_SECRET}; "
            "create one with: openssl rand -hex 32"
        )
    return hmac.digest(text.encode(), b"tandem: nodes of one job", "sha256")


def _wipe(name: str) -> None:
    """Overwrite a variable with zeros in this process's initial environment.

    /proc/PID/environ keeps showing that memory, for this process and for all that are forked from it.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if (address := getenv(name.encode())) is not None:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


NOTIFY = "TANDEM_NOTIFY"


def conceal(webhook: Webhook | None, environ: MutableMapping[str, str], words: list[str]) -> None:
    """Remove a webhook's address from this process's variables and arguments, and from the output of `ps`.

    `words` is sys.argv. Processes that it starts, such as ranks, then do not have it either.
    """
    variable = environ.pop(NOTIFY, "")
    if environ is os.environ:
        _wipe_block(50, variable.encode())
    if webhook is None or not webhook.address:
        return
    words[:] = [word.replace(webhook.address, webhook) for word in words]
    _wipe_block(48, webhook.address.encode())


def _wipe_block(field: int, secret: bytes) -> None:
    """Overwrite a text with stars in memory that /proc shows (Linux: proc(5)).

    `field` of /proc/PID/stat is where it begins, and the next one is its end: 48 for /proc/PID/cmdline,
    50 for /proc/PID/environ. Both are 0 where the kernel hides them.
    """
    fields = stat_of(os.getpid())  # from field 3 on
    start, end = (int(each) for each in fields[field - 3 : field - 1]) if len(fields) > field - 2 else (0, 0)
    if not secret or not start or end - start > LONGEST_BLOCK:
        return
    at = ctypes.string_at(start, end - start).find(secret)
    if at >= 0:
        ctypes.memset(start + at, ord("*"), len(secret))
