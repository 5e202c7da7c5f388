"""All checks of one manifest or rendered overlay, as a list of one-line problems."""

from collections.abc import Callable, Iterable
from typing import Any

import yaml

from tandem_k8s.documents import Document, load
from tandem_k8s.rules import NINE, OWN
from tandem_k8s.schemas import closed_schema, core_schema, round_trip
from tandem_k8s.security import restricted

DOCUMENT_CHECKS = (closed_schema, core_schema, round_trip, restricted)


def problems_of(text: str) -> list[str]:
    """Return every problem of a YAML text; one line if it cannot be parsed."""
    try:
        documents = load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return [f"malformed YAML: {where}{getattr(error, 'problem', None) or ' '.join(str(error).split())}"]
    if strange := [each for each in documents if not isinstance(each, dict)]:
        return [
            f"malformed YAML: a document is a {type(strange[0]).__name__}; expected a mapping with a kind"
        ]
    return problems(documents) if documents else ["malformed YAML: no document"]


def problems(documents: list[Document]) -> list[str]:
    """Return the problems of all checks, without duplicates."""
    found = [line for check in DOCUMENT_CHECKS for document in documents for line in _judged(check, document)]
    found += [line for rule in (*NINE, *OWN) for line in _judged(rule, documents)]
    return list(dict.fromkeys(found))


def _judged(check: Callable[[Any], Iterable[str]], subject: object) -> list[str]:
    """Run one check. If the manifest lacks a field that the check reads, report that and continue."""
    try:
        return list(check(subject))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        return [f"{check.__name__} cannot check it: {type(error).__name__} {error}"]
