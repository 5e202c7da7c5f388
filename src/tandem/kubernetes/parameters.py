"""Find the job's name and its number of nodes in the manifests. Standard library only.

`tandem k8s --name --nodes`, `tandem init` and the Helm chart all use `marked`, the only list of these fields.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

JOB = "tandem"
"""The name of the job in the manifests."""
NAME = "@name@"
NODES = "@nodes@"
WORKERS = "@workers@"
"""What `marked` puts in place of the name, of the number of nodes, and of the number of Workers."""
COUNTS = ("completions", "parallelism", "numNodes", "maxReplicas")
COUNT_VARIABLES = ("NODES", "NNODES")
NAMED = ("job-name", "jobset-name", "app.kubernetes.io/instance", "subdomain")
"""Labels and fields with the job's name as their value, by the end of their key."""
_OBJECT = rf"{JOB}-(checkpoints|egress|job|metrics|script)"
"""Other objects of the job: NAME-checkpoints and so on."""
_SHARED = re.compile(r"^kind: PrometheusRule$|^  name: tandem-dashboard$", re.M)
"""Alert rules and the dashboard serve all jobs: a copy for each would send every alert twice."""
_YAML_WORDS = ("false", "n", "no", "null", "off", "on", "true", "y", "yes")
"""Names that YAML reads as another type unless they are quoted."""
_LINE = re.compile(
    r"""(?P<indent>[ ]*)(?P<dashes>(?:-[ ]+)*)(?:(?P<key>[\w./-]+):(?=\s))?[ ]*"""
    r"""(?P<value>"[^"]*"|'[^']*'|\{[^}]*\}|[^\s#]\S*)?(?:\s+\#.*|\s*)""",
    re.DOTALL,
)
"""A line with at most one scalar (or flow mapping) and a comment; no more of YAML is read here."""


def marked(path: Sequence[str], value: str) -> str:
    """Return the scalar `value` at `path` with marks for the job's name and node counts.

    A path consists of keys; an entry of a list is its `name`, or "*" if it has none.
    """
    key = path[-1]
    if key in COUNTS or (key == "value" and path[-2] in COUNT_VARIABLES):
        return NODES
    if tuple(path[-2:]) == ("Worker", "replicas"):
        return WORKERS
    if value == JOB:
        is_name = tuple(path) == ("metadata", "name") or tuple(path[-2:]) == ("runtimeRef", "name")
        return NAME if is_name or key.endswith(NAMED) else value
    if value.startswith("{"):
        return re.sub(rf"(?<=: ){_OBJECT}(?=[,}}])", rf"{NAME}-\1", value)
    value = re.sub(rf"^{_OBJECT}$", rf"{NAME}-\1", value)
    value = re.sub(rf"^{JOB}-0\.{JOB}$", f"{NAME}-0.{NAME}", value)
    return re.sub(rf"^/checkpoints/{JOB}$", f"/checkpoints/{NAME}", value)


def substituted(text: str, name: str, nodes: int | None = None, *, has_master: bool = True) -> str:
    """Return the manifest with another name and, unless None, another number of nodes.

    `text` is what kustomize prints, or one of this project's own files, whose comments stay.
    """
    values = {NAME: name}
    if nodes is not None:
        # The Master of a PyTorchJob is one of the nodes.
        values |= {NODES: str(nodes), WORKERS: str(nodes - has_master)}
    documents = re.split(r"^(?=---$)", text, flags=re.M)
    return "".join(each if _SHARED.search(each) else "".join(_lines(each, values)) for each in documents)


def _lines(text: str, values: Mapping[str, str]) -> Iterator[str]:
    around: list[tuple[int, str]] = []  # (depth, element) of the keys and list entries around a line
    block = -1  # the indentation of a key whose value is a text of several lines
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        if block >= 0 and (indent > block or not line.strip()):
            yield line
            continue
        block = -1
        match = _LINE.fullmatch(line)
        if match is None:  # such as a list on one line: nothing to replace in it
            yield line
            continue
        dashes = match["dashes"]
        key = match["key"]
        value = match["value"] or ""
        # A list may begin at the column of its key: an entry is half a column deeper than a key.
        found = [(2 * (indent + dash.start()) + 1, "*") for dash in re.finditer("-", dashes)]
        found += [(2 * (indent + len(dashes)), key)] if key else []
        for depth, element in found:
            around = [*(each for each in around if each[0] < depth), (depth, element)]
        if key == "name" and len(around) > 1 and around[-2][1] == "*":
            around[-2] = (around[-2][0], value)
        if re.fullmatch(r"[|>][-+0-9]*", value):
            block = indent + (len(dashes) if key else 0)
        path = [element for _, element in around]
        start, end = match.span("value")
        yield f"{line[:start]}{_replaced(value, path, values)}{line[end:]}" if value and path else line


def _replaced(value: str, path: Sequence[str], values: Mapping[str, str]) -> str:
    bare = value.strip("\"'")
    made = marked(path, bare)
    if made in (NODES, WORKERS) and made not in values:
        return value
    for mark, text in values.items():
        made = made.replace(mark, text)
    needs_quotes = made != value == bare and made in _YAML_WORDS
    return f'"{made}"' if needs_quotes else value.replace(bare, made)


# Commands in messages: `make k8s-VERB` for users who typed make, else `tandem k8s VERB`.

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
