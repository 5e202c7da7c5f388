"""Generate the reference pages that follow from the code: cli.md, exit-codes.md and api.md.

It also writes the tables at the end of configuration.md and metrics.md.

python docs/reference.py
"""

import ast
import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem import cli, config, errors
from tandem.config.show import EXIT_CODES
from tandem.custom_loop import run
from tandem.data.arrow_rows import arrow
from tandem.data.datasets import Datasets
from tandem.data.mixture import mix
from tandem.data.parquet_files import parquet
from tandem.data.token_files import tokens
from tandem.tasks import base
from tandem.telemetry import metrics

DOCS = Path(__file__).parent
CLI = """# Command line
`tandem VERB -h` prints what is on this page. `tandem VERB --help` also prints every setting that the verb \
accepts; they are listed in [configuration.md](configuration.md). `make docs` generates \
this page.
"""
CODES = """# Exit codes
`tandem help exit-codes` prints this table. The last column lists the errors that end a process with that \
code. [troubleshooting.md](troubleshooting.md#exit-codes) describes which code a job has if its ranks end \
with different ones. `make docs` generates this page.
"""
ERRORS = """## Errors
Each error is a class in `tandem.errors`. `tandem.TandemError` is the base of all.
"""
API = """# Python API
These are the names that a script or a task uses. [your-own-loop.md](your-own-loop.md) and \
[bring-your-own-model.md](bring-your-own-model.md) show them in use. `make docs` generates this \
page.
"""
SCRIPT = """## Scripts
"""
TREE = "All errors are listed in [exit-codes.md](exit-codes.md#errors).\n"
TASK = """## Tasks
A task is a plain class with the three methods of `Task`. It needs no base class and no import, except for \
`Datasets`.
"""
OPTIONAL = """### Optional methods
A task that lacks one of these behaves as described here. If you define one, its arguments \
have these positions.
"""
COLLATE = """#### collate

```python
def collate(samples: list[Any]) -> Any
```

Return a batch; replaces torch's `default_collate`.
"""
DATA = """## Data
"""


def cli_page() -> str:
    """`tandem --help`, then the help of each verb."""
    with contextlib.redirect_stdout(io.StringIO()) as overview:
        cli.run("--help", [], {})
    parts = [CLI, _block(overview.getvalue())]
    for title, verbs in cli.GROUPS.items():
        parts.append(f"## {title}\n")
        for verb in verbs:
            parts += [f"### tandem {verb}\n", _block(cli.parser_of(verb, is_short=True).format_help())]
    return "\n".join(parts)


def exit_codes_page() -> str:
    """The codes, then the tree of errors."""
    tree = list(_tree(errors.TandemError))
    rows = re.findall(r"^  (\d+) +(.+)$", EXIT_CODES, re.MULTILINE)
    names = {code: [f"`{each.__name__}`" for each in tree if str(each.exit_code) == code] for code, _ in rows}
    codes = [f"| {code} | {text} | {', '.join(names[code])} |" for code, text in rows]
    classes = [
        f"| `{each.__name__}` | `{each.__bases__[0].__name__}` | {each.exit_code} | {_first_line(each)} |"
        for each in tree
    ]
    head = "| code | meaning | errors |\n|---|---|---|\n"
    head_of_classes = "| error | base | exit code | meaning |\n|---|---|---|---|\n"
    return "\n".join(
        [CODES, head + "\n".join(codes) + "\n", ERRORS, head_of_classes + "\n".join(classes) + "\n"]
    )


def api_page() -> str:
    """The public names: signatures as they are written, and docstrings."""
    parts = [API, SCRIPT, _entry("tandem.start", run.start), _entry("tandem.Run", run.Run)]
    parts += [_entry(f"run.{name}", member, level=4) for name, member in _members(run.Run)]
    error = errors.TandemError
    parts.append(
        _entry("tandem.TandemError", error) + "\nThe whole tree: [exit-codes.md](exit-codes.md#errors).\n"
    )
    parts += [TASK, _entry("Task", base.Task)]
    parts += [_entry(name, member, level=4) for name, member in _members(base.Task)]
    parts += [OPTIONAL, COLLATE]
    parts += [_entry(name, member, level=4) for name, member in _members(base.TaskWithDefaults)]
    readers = [_entry(f"tandem.data.{each.__name__}", each) for each in (arrow, mix, parquet, tokens)]
    return "\n".join([*parts, DATA, _entry("Datasets", Datasets), *readers])


def _block(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def _tree(error: type[errors.TandemError]) -> Iterator[type[errors.TandemError]]:
    yield error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child)


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").splitlines()[0]


def _members(of: type[Any]) -> list[tuple[str, Any]]:
    """Public methods and properties, in the order of the class."""
    return [
        (name, member)
        for name, member in vars(of).items()
        if name[0] != "_" and (inspect.isfunction(member) or isinstance(member, property))
    ]


def _entry(title: str, found: Any, level: int = 3) -> str:
    text = _markdown(inspect.getdoc(found) or "") if found.__doc__ else ""
    head = f"{'#' * level} {title}\n\n{_block(_signature(found), 'python')}"
    return f"{head}\n{text}\n" if text else head


def _signature(found: Any) -> str:
    """The lines before the docstring; of a class the first one, and fields that a reader uses."""
    source = textwrap.dedent(inspect.getsource(found.fget if isinstance(found, property) else found))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = source.splitlines()
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
        shown = fields if found in (Datasets, errors.TandemError) else []
        return "\n".join([lines[0].rstrip(":"), *(f"    {each}" for each in shown)])
    if isinstance(found, property):
        return f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    last = max(node.lineno, node.body[0].lineno - 1)
    text = "\n".join(lines[node.lineno - 1 : last])
    text = re.sub(r"\(\s*self(, )?,?", "(", text, count=1)
    text = re.sub(r"\b_(?=[a-z]\w*:)", "", text)  # arguments that the default ignores
    return re.sub(r":( \.\.\.)?$", "", text)


def _markdown(text: str) -> str:
    """A docstring, with its indented examples as blocks of Python."""
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("    "):
            parts.append(paragraph)
        elif parts and parts[-1].startswith("```"):  # an example with an empty line
            parts[-1] = parts[-1].removesuffix("\n```") + "\n\n" + textwrap.dedent(paragraph) + "\n```"
        else:
            parts.append(_block(textwrap.dedent(paragraph), "python").strip())
    return "\n\n".join(parts)


def with_end(page: str, end: str) -> str:
    """Return a page with its generated end, which begins with the same line as before, replaced by `end`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    head = end.partition("\n")[0]
    return text[: text.index(f"\n{head}\n") + 1] + end


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "exit-codes.md": exit_codes_page,
    "api.md": api_page,
    "configuration.md": lambda: with_end("configuration.md", config.markdown()),
    "metrics.md": lambda: with_end("metrics.md", metrics.markdown_table().strip() + "\n"),
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
