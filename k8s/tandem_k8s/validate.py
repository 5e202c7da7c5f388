"""All checks of one manifest or rendered overlay, as a list of one-line problems."""

from tandem_k8s.documents import Document
from tandem_k8s.rules import NINE, OWN
from tandem_k8s.schemas import closed_schema, core_schema, round_trip
from tandem_k8s.security import restricted

DOCUMENT_CHECKS = (closed_schema, core_schema, round_trip, restricted)


def problems(documents: list[Document]) -> list[str]:
    """Every problem of every check, each line once."""
    found = [line for check in DOCUMENT_CHECKS for document in documents for line in check(document)]
    found += [line for rule in (*NINE, *OWN) for line in rule(documents)]
    return list(dict.fromkeys(found))
