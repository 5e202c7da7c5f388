"""The address of a webhook: anyone who has it can post there, so its text hides the secret part."""

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

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
        """The host, without its port."""
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
