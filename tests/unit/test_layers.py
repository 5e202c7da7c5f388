"""The layers of the package, read from its imports: lower layers only, row order within a layer, no circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tandem"

# (layer, rows): a module imports from lower layers, or from rows above its own. One string = one row; modules
# of one row may import each other as long as there is no circle. A new entry is a design decision.
LAYERS: list[list[str]] = [
    ["errors", "schedule meter"],
    ["config", "log signals scratch"],
    [
        "cluster.environment",
        "cluster.kubernetes cluster.slurm",
        "cluster.placement cluster.replica",
        "cluster.memory",
        "cluster.world cluster.timing",
        "cluster.pulse cluster.agreement",
        "cluster.watchdog",
        "cluster.warm cluster.ranks",
        "cluster.rendezvous",
        "cluster.worlds",
        "cluster.agent",
    ],
    ["data.*", "tasks.*", "observe.*"],
    ["checkpoint.*"],
    ["training.*"],
    ["doctor verify_resume bench launch"],
    ["cli", "__main__"],
]
PACKAGES = ("", "cluster", "data", "tasks", "observe", "checkpoint", "training")  # their __init__: no imports

# What (prefix of a dotted name, imported or used) -> which modules may.
# Beyond the design's table, for a reason each: the agent and the ranks' world need the store that they meet at,
# the fork server preloads DDP, the metrics server is a socket, doctor's business is to try what the others use.
RESERVED: dict[str, tuple[str, ...]] = {
    "pydantic_settings": ("config",),
    "dotenv": ("config",),
    "logging.basicConfig": ("log",),
    "logging.config": ("log",),
    "logging.handlers": ("log",),
    "logging.StreamHandler": ("log",),
    "logging.FileHandler": ("log",),
    "signal.signal": ("signals",),
    "torch.nn.parallel": ("cluster.world", "cluster.warm"),
    "torch.distributed.fsdp": ("cluster.world",),
    "torch.distributed.algorithms": ("cluster.world",),
    "torch.distributed.elastic": ("cluster.rendezvous", "cluster.worlds", "cluster.agent", "cluster.warm"),
    "torch.distributed": (
        "cluster.world",
        "cluster.watchdog",
        "cluster.rendezvous",
        "cluster.worlds",
        "cluster.agent",
        "cluster.ranks",
        "cluster.warm",
        "doctor",
    ),
    "multiprocessing": ("cluster.memory", "cluster.agent", "cluster.ranks", "cluster.warm"),
    "socket": (
        "cluster.replica",
        "cluster.watchdog",
        "cluster.rendezvous",
        "observe.server",
        "observe.samples",
        "doctor",
        "launch",
        "cli",
    ),
    "os._exit": ("cluster.watchdog", "cluster.agent", "cluster.ranks", "cluster.warm", "cli"),
    "prometheus_client": ("observe.*",),
    "tqdm": ("observe.*",),
    "pynvml": ("observe.*",),
    "sys.exit": ("cli", "__main__"),
    "argparse": ("cli",),
    "os.environ": ("cli", "cluster.agent", "cluster.ranks"),  # read by cli; only agent and ranks write
    "os.getenv": ("cli",),
}
LAZY = ("torchvision",)  # never at module level: the default run works without it


def modules() -> dict[str, ast.Module]:
    """Dotted name without `tandem.` -> syntax tree, for every module that is there."""
    trees = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    return trees


MODULES = modules()


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


def row_of(name: str) -> tuple[int, int] | None:
    """(layer, row); an exact name beats a pattern."""
    found = [
        (pattern.endswith(".*"), (layer, row))
        for layer, rows in enumerate(LAYERS)
        for row, patterns in enumerate(rows)
        for pattern in patterns.split()
        if matches(name, pattern)
    ]
    return min(found)[1] if found else None


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {inner for block in blocks for inner in ast.walk(block)}


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(local name, dotted target) of every import, also those inside functions."""
    ignored = type_checking_only(tree)
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def used(tree: ast.Module) -> set[str]:
    """Dotted names this module imports or reaches through an imported name (`import os` + `os.environ`)."""
    names = dict(imported(tree))
    roots = {
        local: target if "." not in target or local != target.split(".")[0] else local
        for local, target in names.items()
    }
    chains = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    through = {
        f"{roots[head]}.{rest}" for head, _, rest in (c.partition(".") for c in chains) if head in roots
    }
    return {target for _, target in imported(tree)} | through


def internal(tree: ast.Module) -> set[str]:
    """The tandem modules this one imports; a name out of a module counts as that module."""
    found = set()
    for _, target in imported(tree):
        name = target.removeprefix("tandem.")
        if target.startswith("tandem.") or target == "tandem":
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found - {"", "tandem"} - set(PACKAGES)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in PACKAGES])
def test_imports_go_down(name: str) -> None:
    own = row_of(name)
    assert own is not None, f"{name} stands in no layer: decide where it belongs, and add it to LAYERS"
    for target in internal(MODULES[name]) - {name}:
        other = row_of(target)
        assert other is not None and other <= own, f"{name} (layer {own}) imports {target} (layer {other})"


def test_no_circles() -> None:
    graph = {name: internal(tree) - {name} for name, tree in MODULES.items()}
    while True:
        leaves = {name for name, targets in graph.items() if not targets & graph.keys()}
        if not leaves:
            break
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"


@pytest.mark.parametrize("name", list(MODULES))
def test_reserved_names_stay_where_they_belong(name: str) -> None:
    for what in used(MODULES[name]):
        owners = next(
            (
                o
                for p, o in sorted(RESERVED.items(), key=lambda i: -len(i[0]))
                if f"{what}.".startswith(p + ".")
            ),
            None,
        )
        assert owners is None or any(matches(name, owner) for owner in owners), (
            f"{name} uses {what}; only {owners} may"
        )


@pytest.mark.parametrize("name", list(MODULES))
def test_heavy_optional_imports_are_lazy(name: str) -> None:
    top = {
        target
        for node in MODULES[name].body
        for _, target in imported(ast.Module([node], []))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not [target for target in top if target.split(".")[0] in LAZY]


@pytest.mark.parametrize("name", [name for name in PACKAGES if name in MODULES])
def test_packages_import_nothing(name: str) -> None:
    assert not list(imported(MODULES[name]))
