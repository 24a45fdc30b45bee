"""Check the import graph of the package: no cycles, no chain longer than LONGEST, no import of `reporting` from below.

    python tools/import_graph.py          checks src/gradlogz; exit status 1 if a rule is broken

Every import statement counts: at the top of a module, inside a function, under TYPE_CHECKING. Two kinds of edges are
excluded: those of the root package, which lists names of all subpackages for type checkers, and those from a module to
a package that contains it, which Python always imports first.

Test: tests/package/test_imports_point_downward.py. Layers of subpackages: [tool.importlinter] in pyproject.toml.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

LONGEST = 16  # maximum number of modules in a chain of imports
ROOT = Path(__file__).parent.parent / "src" / "gradlogz"
RENDERER = "reporting"
MAY_RENDER = {"reporting", "cli", "commands", "__main__"}  # packages above the renderer

Graph = dict[str, set[str]]


class Rules(NamedTuple):
    """Violations of each rule, one sentence each; all lists are empty if there are none."""

    cycles: list[str]
    chains: list[str]
    renderers: list[str]


def import_graph(root: Path) -> Graph:
    """Return the modules of a package, each with the modules of the package that it imports."""
    paths = {_name(path, root): path for path in root.rglob("*.py")}
    graph = {name: set(_imported(name, path, set(paths))) for name, path in paths.items()}
    graph.pop(root.name, None)
    return {
        name: {other for other in imported if other != root.name and not f"{name}.".startswith(f"{other}.")}
        for name, imported in graph.items()
    }


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in graph if other in reached[name] and name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if group)


def longest_chain(graph: Graph) -> list[str]:
    """Return a longest chain of imports, from importer to imported; raise CycleError if there is a cycle."""
    chain: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chain[name] = [name, *max((chain[other] for other in graph.get(name, ())), key=len, default=[])]
    return max(chain.values(), key=len, default=[])


def importers(graph: Graph, package: str) -> list[tuple[str, str]]:
    """Return the pairs (module outside the package, module of the package that it imports)."""

    def inside(name: str) -> bool:
        return f"{name}.".startswith(f"{package}.")

    return sorted((a, b) for a, imported in graph.items() for b in imported if inside(b) and not inside(a))


def broken_rules(graph: Graph, package: str) -> Rules:
    """Return the violations of the three rules."""
    rings = [f"cycle: {' '.join(group)}" for group in cycles(graph)]
    try:
        chain = longest_chain(graph)
    except CycleError:
        chain = []  # a cycle has no longest chain
    too_long = (
        [f"chain of {len(chain)}, at most {LONGEST} allowed: {' -> '.join(chain)}"] if len(chain) > LONGEST else []
    )
    rendering = [
        f"renders: {a} imports {b}"
        for a, b in importers(graph, f"{package}.{RENDERER}")
        if a.split(".")[1] not in MAY_RENDER
    ]
    return Rules(rings, too_long, rendering)


def _name(path: Path, root: Path) -> str:
    return ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def _imported(name: str, path: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules imported anywhere in a file."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            before = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join((*before, *([node.module] if node.module else [])))
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            module = _module(target, modules)
            if module is not None and module != name:
                yield module


def _module(target: str, modules: set[str]) -> str | None:
    """Return the module of a dotted name: the name itself, or its longest prefix that is a module."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def _reachable(graph: Graph, start: str) -> set[str]:
    """Return the modules that a module imports, directly or indirectly; it includes itself only in a cycle."""
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(graph.get(name, ()))
    return reached


def main() -> int:
    graph = import_graph(ROOT)
    broken = broken_rules(graph, ROOT.name)
    for sentence in (*broken.cycles, *broken.chains, *broken.renderers):
        print(sentence)
    depth = "" if broken.cycles else f", longest chain {len(longest_chain(graph))} of at most {LONGEST}"
    print(f"{len(graph)} modules, {len(broken.cycles)} cycles{depth}, {len(broken.renderers)} imports of a renderer")
    return 1 if any(broken) else 0


if __name__ == "__main__":
    sys.exit(main())
