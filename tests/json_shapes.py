"""The shape of a JSON document: every value replaced by its type."""

from typing import Any

BY_NAME = ("settings", "scores", "eval", "facts", "digests", "seconds", "causes")
"""Objects whose keys differ from run to run."""


def shape(value: Any, name: str = "") -> Any:
    """The types of a document: `NAME` stands for keys that differ from run to run."""
    if isinstance(value, dict):
        inner = {key: shape(each, key) for key, each in value.items()}
        return {"NAME": merged(list(inner.values()))} if name in BY_NAME and inner else inner
    if isinstance(value, list):
        return [merged([shape(each) for each in value])] if value else []
    if isinstance(value, bool):
        return "true or false"
    return "null" if value is None else "text" if isinstance(value, str) else "number"


def merged(shapes: list[Any]) -> Any:
    if all(isinstance(each, dict) for each in shapes):
        keys = list(dict.fromkeys(key for each in shapes for key in each))
        return {key: merged([each[key] for each in shapes if key in each]) for key in keys}
    if all(isinstance(each, list) for each in shapes):
        inner = [part for each in shapes for part in each]
        return [merged(inner)] if inner else []
    words = {word for each in shapes for word in each.replace("true or false", "yes/no").split(" or ")}
    ordered = sorted(words, key=lambda word: (word == "null", word))
    return " or ".join(ordered).replace("yes/no", "true or false")
