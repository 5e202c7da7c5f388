"""What a value must look like, in words instead of regular expressions.

The schemas of custom resources state it as patterns. Those of Kubernetes' own kinds have no patterns, so
their names and quantities are checked here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem_k8s.documents import Document, title

_NUMBER = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY = rf"^(\+|-)?{_NUMBER}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{_NUMBER}))?$"
DURATION = "^(0|" + "".join(f"(([0-9]+){unit})?" for unit in ("y", "w", "d", "h", "m", "s", "ms")) + ")$"
LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_CHARACTERS = 63
SUBDOMAIN_CHARACTERS = 253
CPUS = "a number of CPUs: an integer, 500m or 1.5"
BYTES = "a number of bytes, such as 4Gi, 500Mi or 20G"
BYTE_KEYS = ("memory", "storage", "ephemeral-storage", "sizeLimit")
WORDS: Mapping[str, str] = {
    QUANTITY: "a number, such as 1 or 500m",
    DURATION: "a duration, such as 30s, 5m or 1h30m",
    LABEL: "lowercase letters, digits and '-', a letter first and no '-' last",
    SUBDOMAIN: "lowercase letters, digits, '-' and '.', a letter or digit at both ends",
    r"^(http|https|socks5)://.+$": "a URL that begins with http://, https:// or socks5://",
    r"^(http|https)://.+$": "a URL that begins with http:// or https://",
    r"(^0|([0-9]*[.])?[0-9]+((K|M|G|T|E|P)i?)?B)$": "a size in bytes, such as 512KB or 10MiB",
    "^(?i)(abort|warn)?$": "abort or warn",
    r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$": "letters, digits and '_,:', a letter first",
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$":
        "[PREFIX/]NAME of letters, digits and '-_.', a letter or digit at both ends",
}  # fmt: skip
"""{pattern of a schema: what it allows}."""
TYPES = {
    "string": "text in quotes", "integer": "an integer", "number": "a number", "boolean": "true or false",
    "array": "a list", "object": "a mapping",
}  # fmt: skip


def expected(pattern: str, path: Sequence[str | int]) -> str:
    """Describe the values at `path` that match a pattern."""
    if pattern == QUANTITY and path:
        if path[-1] == "cpu":
            return CPUS
        if path[-1] in BYTE_KEYS:
            return BYTES
    return WORDS.get(pattern, f"a value that matches {pattern}")


def of_types(alternatives: Sequence[Any]) -> str:
    """Describe a schema's alternatives if each is only a type; otherwise return ''."""
    if not all(isinstance(each, dict) and set(each) <= {"type", "format"} for each in alternatives):
        return ""
    names = [each.get("type", []) for each in alternatives]
    flat = [name for each in names for name in ([each] if isinstance(each, str) else each) if name != "null"]
    return " or ".join(TYPES.get(name, name) for name in dict.fromkeys(flat))


def matches(pattern: str, text: str) -> bool:
    """Return True if the text matches; Go allows (?i) anywhere, Python only at the start."""
    flags = re.IGNORECASE if "(?i)" in pattern else 0
    return re.search(pattern.replace("(?i)", ""), text, flags) is not None


def core_values(document: Document) -> Iterator[str]:
    """Yield a message for each name and quantity of a built-in kind that the API server would refuse."""
    name = (document.get("metadata") or {}).get("name")
    is_label = document.get("kind") == "Service"
    pattern, most = (LABEL, LABEL_CHARACTERS) if is_label else (SUBDOMAIN, SUBDOMAIN_CHARACTERS)
    if not isinstance(name, str) or not matches(pattern, name) or len(name) > most:
        yield f"{title(document)}: metadata.name: {wrong(name)}; expected at most {most} {WORDS[pattern]}"
    for path, value in _quantities(document, ()):
        if isinstance(value, str) and not matches(QUANTITY, value):
            where = ".".join(path)
            yield f"{title(document)}: {where}: {wrong(value)}; expected {expected(QUANTITY, path)}"


def wrong(value: object) -> str:
    """Return the beginning of a message about an invalid value."""
    text = repr(value)
    return f"invalid value {text if len(text) < 100 else text[:97] + '...'}"


def _quantities(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        for key, below in value.items():
            inside = (*path, str(key))
            if inside[-3:-1] in (("resources", "limits"), ("resources", "requests")) or key == "sizeLimit":
                yield inside, below
            else:
                yield from _quantities(below, inside)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _quantities(below, (*path, str(index)))
