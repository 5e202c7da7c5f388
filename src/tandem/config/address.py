"""Where a run is stored: a local directory, or a remote location given by its address."""

import re
from pathlib import Path, PurePath, PurePosixPath

from tandem.errors import ConfigError

SCHEMES = {
    "s3": "tandem.checkpoint.storage.objects:Objects",
    "gs": "tandem.checkpoint.storage.objects:Objects",
    "az": "tandem.checkpoint.storage.objects:Objects",
}
"""Scheme -> the `protocol.Remote` for it, which is created as CLASS(scheme, host)."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+-]*):(/+)([^/]+)(.*)")


class RemotePath(PurePosixPath):
    """A remote address such as s3://bucket/prefix."""

    def __str__(self) -> str:
        # pathlib collapses the two slashes of an address into one.
        return super().__str__().replace(":/", "://", 1)

    @property
    def scheme(self) -> str:
        """The scheme, such as `s3`."""
        return self.parts[0].rstrip(":")

    @property
    def host(self) -> str:
        """The part after the scheme: a bucket, or HOST:PORT."""
        return self.parts[1]


def address(text: str | PurePath) -> PurePath:
    """Return a Path, or a RemotePath for s3://bucket/prefix (or s3:/bucket/prefix, as pathlib prints it).

    Raises ConfigError for an unknown scheme, and for a password, because addresses appear in logs and files.
    """
    found = _ADDRESS.fullmatch(str(text))
    if found is None:
        return Path(text)
    scheme, slashes, host, rest = found.groups()
    # Checked before the scheme is known: a password must not appear in the error about a bad scheme either.
    if re.match(r"[^@]*:[^@]*@", host):
        raise ConfigError(
            f"the address {scheme}://USER:PASSWORD@{host.rpartition('@')[2]}{rest} contains a password, "
            f"which would appear in logs; remove it and set FSSPEC_{scheme.upper()}='{{...}}' instead"
        )
    if scheme in SCHEMES:
        # One slash, so that both spellings of an address give equal paths.
        return RemotePath(f"{scheme}:/{host}{rest}")
    # A single slash after an unknown scheme is a local path that contains a colon.
    if slashes == "/":
        return Path(text)
    valid = ", ".join(f"{known}://" for known in SCHEMES)
    raise ConfigError(f"invalid address {text}; expected a directory or one of {valid}")
