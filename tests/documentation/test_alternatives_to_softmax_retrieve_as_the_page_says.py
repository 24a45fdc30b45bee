"""The example of retrieval runs, and its order is that of the table in docs/layers.md."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("alternatives_to_softmax")


def table():
    """Mean accuracies on the page: attention to numbers by pairs."""
    text = (ROOT / "docs" / "layers.md").read_text().partition("| attention | 4 pairs")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name.strip("`"): [float(cell.split()[0]) for cell in cells] for name, *cells in rows}


def test_the_page_has_every_attention(example):
    assert list(table()) == list(example.LAYERS)


def test_softmax_retrieves_more_than_linear_attention(example):
    softmax, linear = (example.accuracy(name, 16, 0, steps=250) for name in ("softmax", "linear, elu"))
    assert softmax > linear + 0.15
    assert table()["softmax"][1] > table()["linear, elu"][1] + 0.15


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_numbers_are_those_of_the_example(example, index):
    pairs = (4, 16, 64)[index]
    for name, means in table().items():
        values = [example.accuracy(name, pairs, seed) for seed in range(3)]
        assert abs(sum(values) / 3 - means[index]) < 0.02, name
