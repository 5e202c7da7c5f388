"""Access control: an optional bearer token and TLS for the metrics server."""

import base64
import hmac
import ipaddress
import ssl
from contextlib import suppress
from dataclasses import dataclass

from tandem.config.slices import MetricsConfig
from tandem.errors import ConfigError

OPEN_PATHS = ("/healthz", "/readyz")
"""Probes of an orchestrator send no token; without it, these paths return only yes or no."""


@dataclass(frozen=True)
class Access:
    """`token` None: anyone may read. `tls` None: plain HTTP."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def allows(self, authorization: str | None) -> bool:
        """Return True if an Authorization header has the token.

        It may be a bearer token, or the password of Basic authentication, which a browser can ask for.
        """
        if self.token is None:
            return True
        scheme, _, credentials = (authorization or "").partition(" ")
        if scheme.lower() == "basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
            except ValueError:  # not Base64, or not UTF-8
                return False
        elif scheme.lower() != "bearer":
            return False
        # Compare in constant time, so that the duration does not show how much of a guess is right, and in
        # bytes, because compare_digest rejects text that is not ASCII.
        return hmac.compare_digest(credentials.strip().encode(), self.token.encode())


def is_local_name(header: str | None) -> bool:
    """Return True if a Host header is an address, or a name that no remote party can have given this machine.

    A malicious page can make its own name resolve to 127.0.0.1. Its scripts can then read from servers there
    (DNS rebinding). Such a name contains a dot. An address is not a name, and a name without a dot belongs to
    this network.
    """
    if header is None:
        return True  # not a browser
    host = header.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    else:
        host = host.partition(":")[0].removesuffix(".")
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return "." not in host or host.endswith(".localhost")


def load_access(config: MetricsConfig) -> Access:
    """Load the access control for --metrics-token-file and --metrics-tls.

    Raises ConfigError if they cannot be used: protected data is never served without protection.
    """
    token = None
    if config.metrics_token_file is not None:
        try:
            token = config.metrics_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--metrics-token-file {config.metrics_token_file}: {error}") from error
        # Any client could send an empty token.
        if not token:
            raise ConfigError(
                f"--metrics-token-file {config.metrics_token_file} is empty; write a token to it"
            )
    return Access(token, _tls(config.metrics_tls))


def _tls(files: str | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    certificate, _, key = files.partition(",")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # RFC 8996 deprecates TLS 1.0 and 1.1.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--metrics-tls {files} cannot be used ({error}); expected a certificate in PEM format "
            "and its key, in the same file or after a comma"
        ) from error
    return context
