"""Commands in messages: `make k8s-VERB` for users who typed make, else `tandem k8s VERB`."""

from collections.abc import Mapping

_MAKE = {
    "--with": "OVERLAY", "--namespace": "NAMESPACE", "--purge": "PURGE", "--image": "IMAGE",
    "--name": "NAME", "--nodes": "NODES",
}  # fmt: skip
_by_make = False


def use_make_wording() -> None:
    """Name make's targets and variables from now on."""
    global _by_make
    _by_make = True


def typed(verb: str, options: Mapping[str, str] | None = None) -> str:
    """Return the command to type: `typed("delete", {"--purge": ""})`."""
    given = options or {}
    if _by_make:
        return " ".join([f"make k8s-{verb}", *(f"{_MAKE[flag]}={text or 1}" for flag, text in given.items())])
    return " ".join([f"tandem k8s {verb}", *(f"{flag} {text}".rstrip() for flag, text in given.items())])


def option(flag: str) -> str:
    """Return the name of an option: `OVERLAY` or `--with`."""
    return _MAKE[flag] if _by_make else flag


def mistake(flag: str, text: str) -> str:
    """Return the beginning of a message about an invalid value."""
    return f"{_MAKE[flag]}={text!r}:" if _by_make else f"{flag}: invalid value {text!r};"
