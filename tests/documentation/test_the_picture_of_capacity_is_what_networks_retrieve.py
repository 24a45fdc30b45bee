"""The numbers drawn in docs/pictures/hopfield_capacity.svg can be measured again, and theory bounds them."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from gradlogz.dynamics import retrieval_bound

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs" / "pictures" / "hopfield_capacity.json").read_text())


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("hopfield_capacity", ROOT / "examples" / "hopfield_capacity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_can_be_measured_again(example):
    few = example.measured((10, 12), (2, 4, 8, 16, 32, 64))
    for d, curve in few["curves"].items():
        for name, values in curve.items():
            assert values == pytest.approx(FOUND["curves"][d][name][:6], abs=0.01)
    assert few["capacity"]["retrieved"]["12"] == pytest.approx(FOUND["capacity"]["retrieved"]["12"], rel=0.05)


def test_the_bounds_of_some_patterns_are_those_of_all(example):
    patterns = 3 * example.sphere(40, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(example.bounds(patterns, 15), retrieval_bound(patterns, beta=example.BETA)[:15])


def test_what_is_guaranteed_is_kept():
    """Theory 5.7 for every pattern: the share within the bound is at most the share that one update leaves near."""
    for curve in FOUND["curves"].values():
        assert all(g <= k for g, k in zip(curve["guaranteed"], curve["kept"], strict=True))
        assert curve["retrieved"][-1] <= curve["retrieved"][0]


def test_capacity_grows_exponentially_and_exceeds_the_theorem():
    for name in ("retrieved", "guaranteed"):
        known = {int(d): n for d, n in FOUND["capacity"][name].items() if n is not None}
        assert all(n >= FOUND["bound"].get(str(d), 0) for d, n in known.items())
    retrieved = {int(d): n for d, n in FOUND["capacity"]["retrieved"].items() if n is not None}
    assert max(retrieved) == 20
    growth = math.log(retrieved[20] / retrieved[12]) / 8
    assert 0.8 < growth < 1.1  # per dimension, as the page says: a factor of 2.5


def test_a_capacity_is_interpolated(example):
    assert example.capacity([2, 4, 8], [1.0, 0.99, 0.5]) == pytest.approx(4)
    assert example.capacity([2, 8], [1.0, 0.98]) == pytest.approx(4)
    assert math.isnan(example.capacity([2, 4], [1.0, 1.0]))
    assert math.isnan(example.capacity([2, 4], [0.5, 0.1]))
