"""The import graph of the package: no cycle, no chain longer than LONGEST, nothing that computes imports a renderer.

    python tools/import_graph.py          the graph of src/gradlogz; exit status 1 if it breaks a rule

Every import statement counts: at the top of a module, inside a function, under TYPE_CHECKING. Two edges do not: those
of the root package, which lists names of all chapters for type checkers, and those of a module to a package that
contains it, which Python imports first in any case.

Held by: tests/package/test_imports_point_downward.py. Layers of chapters: [tool.importlinter] in pyproject.toml.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

LONGEST = 16  # modules of a chain of imports
ROOT = Path(__file__).parent.parent / "src" / "gradlogz"
RENDERER = "reporting"
MAY_RENDER = {"reporting", "cli", "commands", "__main__"}  # what stands above the renderer

Graph = dict[str, set[str]]


class Rules(NamedTuple):
    """What a graph breaks, one sentence each; all are empty if it breaks nothing."""

    cycles: list[str]
    chains: list[str]
    renderers: list[str]


def import_graph(root: Path) -> Graph:
    """The modules of a package, each with the modules of the package that it imports."""
    paths = {_name(path, root): path for path in root.rglob("*.py")}
    graph = {name: set(_imported(name, path, set(paths))) for name, path in paths.items()}
    graph.pop(root.name, None)
    return {
        name: {other for other in imported if other != root.name and not f"{name}.".startswith(f"{other}.")}
        for name, imported in graph.items()
    }


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, by the names of their modules."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in graph if other in reached[name] and name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if group)


def longest_chain(graph: Graph) -> list[str]:
    """A longest path of imports, from the module that imports to what imports nothing. Raises CycleError on a cycle."""
    chain: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chain[name] = [name, *max((chain[other] for other in graph.get(name, ())), key=len, default=[])]
    return max(chain.values(), key=len, default=[])


def importers(graph: Graph, package: str) -> list[tuple[str, str]]:
    """Pairs (module, module of the package) in which the first imports the second and lies outside."""

    def inside(name: str) -> bool:
        return f"{name}.".startswith(f"{package}.")

    return sorted((a, b) for a, imported in graph.items() for b in imported if inside(b) and not inside(a))


def broken_rules(graph: Graph, package: str) -> Rules:
    """The three rules, judged."""
    rings = [f"cycle: {' '.join(group)}" for group in cycles(graph)]
    try:
        chain = longest_chain(graph)
    except CycleError:
        chain = []  # a chain in a cycle has no end
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
    """The modules that the import statements of a file name, wherever in the file they are."""
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
            found = _module(target, modules)
            if found is not None and found != name:
                yield found


def _module(target: str, modules: set[str]) -> str | None:
    """The module that holds a dotted name: the name itself, or the longest part of it that is a module."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def _reachable(graph: Graph, start: str) -> set[str]:
    """What a module imports, directly or through others; itself only if a cycle leads back to it."""
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
