"""The examples in docstrings of experiments hold."""

import doctest
import importlib
import pkgutil

import pytest

import experiments

MODULES = [info.name for info in pkgutil.walk_packages(experiments.__path__, "experiments.")]


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [t for name in MODULES for t in finder.find(importlib.import_module(name))]
    assert sum(bool(t.examples) for t in tests) >= 5


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
