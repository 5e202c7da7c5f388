"""What a page may not show of a command, a setting or a log: passwords, keys and tokens.

Two nets: what stands behind a name that sounds like a secret, or has the form of a known one; and the values
that this process was itself given under such a name. Quantifiers are bounded: a log may hold anything.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 6
"""A value below this is no secret that could be told apart from ordinary text."""
_NAME = (
    r"[\w.-]{0,60}(?:secret|passw(?:or)?d|passphrase|token|credentials?"
    r"|(?:access|account|api|auth|deploy|encryption|license|master|private|signing|storage)[_-]?key)"
)
_VALUE = r"""("[^"]*"|'[^']*'|[^\s,;&"']+)"""
_IS_SECRET = re.compile(rf"(?:{_NAME}|[\w.-]*secret[\w.-]*|pgpassword|auth|authorization|cookie)\Z", re.I)
_NAMED = re.compile(rf"""(\b{_NAME}["']?(?:\s*[=:]\s*|\s+))((?:(?:bearer|basic)\s+)?){_VALUE}""", re.I)
_HEADER = re.compile(
    r"(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:\w{1,20}\s+)?|\bbearer\s+)([\w.~+/=-]{8,})", re.I
)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^/\s@]{1,300}@", re.I)
_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}"
    r"|\bsk-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)


def is_secret(name: str) -> bool:
    """Whether a variable, a flag or a setting of this name holds a secret; the file of one is none."""
    return _IS_SECRET.fullmatch(name) is not None


def secrets_in(environ: Mapping[str, str]) -> list[str]:
    """The values of an environment that no page may show."""
    return [value for name, value in environ.items() if is_secret(name)]


def hidden(value: Any, secrets: Iterable[str] = (), is_named: bool = False, is_setting: bool = False) -> Any:
    """A copy of plain JSON without secrets, however deep, in names too.

    `is_named`: it stands behind the name of a secret, and no text of it is shown; no number either where it
    `is_setting`: a metric may be called loss_per_token.
    """

    def inner(item: Any, name: object = "") -> Any:
        return hidden(item, secrets, is_named or is_secret(str(name).lstrip("-")), is_setting)

    if isinstance(value, dict):
        label = value.get(
            "name", value.get("key")
        )  # as an environment is written: {"name": ..., "value": ...}
        return {
            hide(str(name), secrets): inner(item, label if name == "value" else name)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        before = ["", *(each if isinstance(each, str) else "" for each in value)]  # ["--password", "..."]
        return [inner(item, name) for item, name in zip(value, before, strict=False)]
    if isinstance(value, str):
        return HIDDEN if is_named and value else hide(value, secrets)
    return HIDDEN if is_named and is_setting and not isinstance(value, bool | None) else value


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without secrets: those given, and what looks like one."""
    for secret in sorted({each.strip() for each in secrets}, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    text = _FORMS.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    return _NAMED.sub(rf"\1\2{HIDDEN}", text)
