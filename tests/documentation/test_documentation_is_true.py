"""Every example of the README, the docs and the docstrings runs, and its equalities hold."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import gradlogz
from gradlogz.reporting.citations import bibliography, keys_in

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/experiments").glob("*.md"))]
NEEDS = {"from_stonesoup.md": "stonesoup"}  # packages that the extra [test] does not install


@pytest.mark.filterwarnings("ignore:'pin_memory' argument", "ignore:::lightning")  # of trainers, about this machine
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_examples_of_a_page_run(page):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    for example in Document.parse(str(page), PythonCodeBlockParser()):
        example.evaluate()


def docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for info in pkgutil.walk_packages(gradlogz.__path__, "gradlogz."):
        for test in finder.find(importlib.import_module(info.name)):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(docstrings()))
def test_the_examples_of_a_docstring_hold(test):
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.failed == 0


def test_every_public_class_and_the_main_functions_have_an_example():
    shown = {p.id for p in docstrings()}
    named = [
        "Empirical",
        "Gaussian",
        "Mixture",
        "Sphere",
        "Gamma",
        "Wishart",
        "Statistic",
        "ConjugatePrior",
        "dual",
        "merge",
    ]
    assert not [name for name in named if not any(i.endswith(f".{name}") for i in shown)]


def test_every_citation_key_is_in_the_bibliography():
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]
    keys = keys_in(source.read_text() for source in sources)
    assert "shim22" in keys
    assert not set(keys) - set(bibliography())
