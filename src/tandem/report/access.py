"""Who may look: an optional bearer token and TLS for the metrics server."""

import base64
import hmac
import ipaddress
import ssl
from contextlib import suppress
from dataclasses import dataclass

from tandem.config.slices import MetricsConfig
from tandem.errors import ConfigError

OPEN_PATHS = ("/healthz", "/readyz")
"""Probes of an orchestrator carry no token; they say no more than yes or no to whoever lacks it."""


@dataclass(frozen=True)
class Access:
    """`token` None: everybody may read. `tls` None: plain HTTP."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def allows(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the token: as bearer, or as the password of Basic,
        which is what a browser can ask a person for."""
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
        return hmac.compare_digest(credentials.strip().encode(), self.token.encode())


def is_local_name(header: str | None) -> bool:
    """Whether a Host header is an address, or a name that nobody far away can have given this machine.

    A foreign page can let its own name point to 127.0.0.1, and its scripts then read what listens there (DNS
    rebinding). Such a name has a dot; an address is no name, and a name without a dot is of this network.
    """
    if header is None:
        return True  # no browser
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
    """From --metrics-token-file and --metrics-tls.

    Raises ConfigError when they cannot be used: what was to be protected is never served in the open.
    """
    token = None
    if config.metrics_token_file is not None:
        try:
            token = config.metrics_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--metrics-token-file {config.metrics_token_file}: {error}") from error
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
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--metrics-tls {files} cannot be used ({error}); expected a certificate in PEM format "
            "and its key, in the same file or after a comma"
        ) from error
    return context
