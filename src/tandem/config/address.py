"""Addresses of runs and webhooks, and the secrets that must not be shown."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

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
        return self.parts[0].rstrip(":")

    @property
    def host(self) -> str:
        """The part after the scheme: a bucket, or HOST:PORT."""
        return self.parts[1]


def from_home(text: str) -> str:
    """Replace ~ or ~/ at the beginning with the home directory, as a shell does at the start of a word.

    A shell does not do it in `--data-dir=~/data`, in a .env file or in TOML.
    """
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def address(text: str | PurePath) -> PurePath:
    """Return a Path, or a RemotePath for s3://bucket/prefix (or s3:/bucket/prefix, as pathlib prints it).

    Raises ConfigError for an unknown scheme, and for a password, because addresses appear in logs and files.
    """
    found = _ADDRESS.fullmatch(str(text))
    if found is None:
        return Path(from_home(str(text)))
    scheme, slashes, host, rest = found.groups()
    # Check this before the scheme: a password must not appear in the error about a bad scheme either.
    if re.match(r"[^@]*:[^@]*@", host):
        raise ConfigError(
            f"the address {scheme}://USER:PASSWORD@{host.rpartition('@')[2]}{rest} contains a password, "
            f"which would appear in logs; remove it and set FSSPEC_{scheme.upper()}='{{...}}' instead"
        )
    if scheme in SCHEMES:
        # Use one slash, so that both spellings of an address give equal paths.
        return RemotePath(f"{scheme}:/{host}{rest}")
    # A single slash after an unknown scheme is a local path that contains a colon.
    if slashes == "/":
        return Path(text)
    valid = ", ".join(f"{known}://" for known in SCHEMES)
    raise ConfigError(f"invalid address {text}; expected a directory or one of {valid}")


# Hide passwords, keys and tokens in commands, settings and logs before they are shown.
#
# It finds secrets in two ways: by form (a value after a name that sounds like a secret, or in a known
# format), and by value (the secrets in this process's own environment). Quantifiers are bounded because a log
# may contain anything.

HIDDEN = "[hidden]"
SHORTEST = 6
"""Shorter values cannot be distinguished from ordinary text."""
SHORTEST_KEY = 16
"""Shorter values of other headers are not treated as keys."""
_NAME = (
    r"[\w.-]{0,60}(?:secret|passw(?:or)?d|passphrase|token|credentials?"
    r"|(?:access|account|api|auth|deploy|encryption|license|master|private|signing|storage)[_-]?key)"
)
_VALUE = r"""("[^"]*"|'[^']*'|[^\s,;&"']+)"""
_IS_SECRET = re.compile(
    rf"(?:{_NAME}|[\w.-]*secret[\w.-]*|pgpassword|auth|authorization|cookie|-{{0,2}}(?:tandem_)?notify)\Z",
    re.I,
)
_ARE_HEADERS = re.compile(r"OTEL_EXPORTER_OTLP_(?:\w+_)?HEADERS")
_NAMED = re.compile(rf"""(\b{_NAME}["']?(?:\s*[=:]\s*|\s+))((?:(?:bearer|basic)\s+)?){_VALUE}""", re.I)
_HEADER = re.compile(
    r"(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:\w{1,20}\s+)?|\bbearer\s+)([\w.~+/=-]{8,})", re.I
)
_IN_WEBHOOK = re.compile(
    r"""(\b(?:tandem_)?notify["']?(?:\s*[=:]\s*|\s+)["']?https?://[^\s/"']{1,300}/"""
    r"|\bhttps://(?:hooks\.slack(?:-gov)?\.com|[\w.-]{1,200}\.(?:webhook\.office|logic\.azure|powerplatform)\.com)"
    r"""(?::\d{1,5})?/)[^\s"']{1,4000}""",
    re.I,
)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^/\s@]{1,300}@", re.I)
# Formats of AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, JSON Web Tokens and PEM keys.
_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}"
    r"|\bsk-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)


def is_secret(name: str) -> bool:
    """Return True if a variable, flag or setting of this name contains a secret.

    A *_file setting does not.
    """
    return _IS_SECRET.fullmatch(name) is not None


def secrets_in(environ: Mapping[str, str]) -> list[str]:
    """Return the secret values of an environment."""
    found = [value for name, value in environ.items() if is_secret(name)]
    for headers in (value for name, value in environ.items() if _ARE_HEADERS.fullmatch(name)):
        found.append(headers)
        for pair in headers.split(","):
            name, _, value = pair.partition("=")
            found.append(pair)  # as a whole, because it may not be written as a pair
            # Any name may have a key as its value. A shorter value may be a tenant's name.
            if is_secret(name.strip()) or len(value) >= SHORTEST_KEY:
                decoded = unquote(value).strip()  # from the encoding of URLs
                # Also as an error shows it, and without a scheme such as Bearer.
                found += [value, decoded, repr(decoded)[1:-1], decoded.rpartition(" ")[2]]
    return found


def hidden(value: Any, secrets: Iterable[str] = (), is_named: bool = False, is_setting: bool = False) -> Any:
    """Return a copy of plain JSON without secrets, at any depth and also in keys.

    `is_named`: the value belongs to a name that sounds like a secret, so its text is hidden. Its numbers are
    hidden only with `is_setting`, because a metric may be called loss_per_token.
    """

    def inner(item: Any, name: object = "") -> Any:
        return hidden(item, secrets, is_named or is_secret(str(name).lstrip("-")), is_setting)

    if isinstance(value, dict):
        label = value.get(
            "name", value.get("key")
        )  # environments are often written as {"name": ..., "value": ...}
        return {
            hide(str(name), secrets): inner(item, label if name == "value" else name)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        # Commands: ["--password", "..."].
        before = ["", *(each if isinstance(each, str) else "" for each in value)]
        return [inner(item, name) for item, name in zip(value, before, strict=False)]
    if isinstance(value, str):
        # An empty value stays visible: it shows that the secret is not set.
        return HIDDEN if is_named and value else hide(value, secrets)
    # A boolean or None is a switch, such as use_token, and reveals nothing.
    return HIDDEN if is_named and is_setting and not isinstance(value, bool | None) else value


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without the given secrets and without anything that looks like one."""
    # Hide the longest first, because a secret may contain a shorter one.
    for secret in sorted({each.strip() for each in secrets}, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    # Search by form before by name: a value after a name ends at a space, and a PEM key contains spaces.
    text = _FORMS.sub(HIDDEN, text)
    text = _IN_WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    return _NAMED.sub(rf"\1\2{HIDDEN}", text)


# The address of a webhook: anyone who has it can post there, so its text hides the secret part.

HIDDEN_PATH = "/[hidden]"
WEBHOOK_VALID = "an http:// or https:// address"
SHORTEST_PART = 12
"""Shorter parts of an address, such as `services`, may be ordinary words."""


class Webhook(str):
    """The address as it may be shown: `https://HOST/[hidden]`.

    Files, logs, pages and ranks get only this text, because JSON, `str` and pickle know nothing else. The
    whole address is in `address`; it is empty where only the text was read, for example in a config.json.
    """

    address: str

    @classmethod
    def parse(cls, value: Any) -> "Webhook":
        """Return the webhook at an address. Raises ValueError for anything that is not one."""
        if isinstance(value, Webhook):
            return value
        # A space or a line break in it would be refused later, with the address in the message.
        if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,4000}", value):
            raise ValueError(WEBHOOK_VALID)
        parts = urlsplit(value)  # ValueError: a bracket without its pair
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(WEBHOOK_VALID)
        port = "" if parts.port is None else f":{parts.port}"  # ValueError: not a port
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        shown = cls(f"{parts.scheme}://{host}{port}{HIDDEN_PATH}")
        shown.address = "" if value == shown else value
        return shown

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy for another process, such as a rank, has only the text.
        return str, (str(self),)

    @property
    def host(self) -> str:
        return urlsplit(self.address or self).hostname or ""

    def secrets(self) -> list[str]:
        """Return the parts of the address that must not be shown, longest first."""
        if not self.address:
            return []
        parts = urlsplit(self.address)
        after_host = self.address.partition("://")[2].partition("/")[2]
        words = [
            *(parts.path.split("/")),
            *(value for _, value in parse_qsl(parts.query)),
            *(parts.username or "", parts.password or "", parts.fragment),
        ]
        found = {
            self.address,
            after_host,
            parts.path.strip("/"),
            parts.query,
            parts.netloc.rpartition("@")[0],
        }
        found |= {word for word in words if len(word) >= SHORTEST_PART}
        return sorted(found - {""}, key=len, reverse=True)
