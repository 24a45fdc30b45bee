"""Imports point downward, late ones and those for type checkers counted: no cycle, short chains, one renderer."""

from graphlib import CycleError
from itertools import pairwise

import pytest

from import_graph import LONGEST, ROOT, broken_rules, cycles, import_graph, importers, longest_chain

GRAPH = import_graph(ROOT)


def test_every_module_is_in_the_graph():
    assert len(GRAPH) == len(list(ROOT.rglob("*.py"))) - 1  # all but the root
    assert all(imported <= set(GRAPH) for imported in GRAPH.values())
    assert sum(map(len, GRAPH.values())) > 500


def test_there_is_no_cycle():
    assert broken_rules(GRAPH, ROOT.name).cycles == []


def test_no_chain_is_longer_than_allowed():
    chain = longest_chain(GRAPH)
    assert len(chain) <= LONGEST, f"{len(chain)} modules: {' -> '.join(chain)}"


def test_what_computes_does_not_import_what_renders():
    assert broken_rules(GRAPH, ROOT.name).renderers == []


# The graph itself, of packages made up for it -------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """Write the files of a package and return its graph."""

    def written(**files):
        root = tmp_path / "made"
        for name, text in {"__init__": "from .a import *", **files}.items():
            path = root / f"{name.replace('__', '/') if name != '__init__' else name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)
        return import_graph(root)

    return written


def test_imports_of_every_form_are_seen(package):
    graph = package(
        a="import made.b\nfrom made import c\nfrom . import d\nfrom .e import name\nfrom .room.f import *",
        b="", c="", d="", e="name = 1", room__f="from ..b import x\nfrom .. import c\nfrom . import f",
    )  # fmt: skip
    assert graph["made.a"] == {"made.b", "made.c", "made.d", "made.e", "made.room.f"}
    assert graph["made.room.f"] == {"made.b", "made.c"}


@pytest.mark.parametrize(
    "late",
    [
        "def f():\n    from . import a",
        "class C:\n    def f(self):\n        import made.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A",
    ],
    ids=["function", "method", "type checker"],
)
def test_a_late_import_closes_a_cycle(package, late):
    graph = package(a="from . import b", b="from . import c", c=late, d="from . import a")
    assert cycles(graph) == [["made.a", "made.b", "made.c"]]
    with pytest.raises(CycleError):
        longest_chain(graph)
    assert broken_rules(graph, "made").cycles == ["cycle: made.a made.b made.c"]


def test_two_cycles_are_told_apart(package):
    graph = package(a="from . import b", b="from . import a", c="from . import a, d", d="from . import c")
    assert cycles(graph) == [["made.a", "made.b"], ["made.c", "made.d"]]


def test_the_longest_chain_is_named(package):
    names = [f"m{i}" for i in range(LONGEST + 2)]
    links = {a: f"from . import {b}" for a, b in pairwise(names)}
    graph = package(a="", **links, **{names[-1]: ""})
    assert longest_chain(graph) == [f"made.{name}" for name in names]
    (sentence,) = broken_rules(graph, "made").chains
    assert sentence.startswith(f"chain of {LONGEST + 2}, at most {LONGEST} allowed: made.m0 -> made.m1")


def test_only_what_stands_above_the_renderer_may_import_it(package):
    late = "def page():\n    from ..reporting import show"
    graph = package(a="", reporting__show="", reporting__pages="from . import show", tracking__run=late, cli=late[:0])
    assert importers(graph, "made.reporting") == [("made.tracking.run", "made.reporting.show")]
    assert broken_rules(graph, "made").renderers == ["renders: made.tracking.run imports made.reporting.show"]
    graph = package(cli="from .reporting import show", commands__show="from ..reporting import pages", tracking__run="")
    assert broken_rules(graph, "made").renderers == []
