"""The numbers drawn in docs/pictures/growth.svg are those that tokens give, and as near to theory as the page says."""

import importlib.util
import json
from pathlib import Path

import pytest

from gradlogz.dynamics import hermite_growth, sphere_growth

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs" / "pictures" / "growth.json").read_text())


def example():
    spec = importlib.util.spec_from_file_location("growth", ROOT / "examples" / "growth.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_can_be_measured_again():
    growth = example()
    assert growth.hermite_measured(3, growth.BETAS[1]) == pytest.approx(FOUND["hermite"]["3"][1], rel=1e-9)
    assert growth.circle_measured(6, 20.0) == pytest.approx(FOUND["circle"]["20.0"][5], rel=1e-9)


def test_on_the_circle_tokens_agree_with_theory():
    for beta, values in FOUND["circle"].items():
        for degree, value in enumerate(values, 1):
            assert value == pytest.approx(sphere_growth(degree, dim=2, beta=float(beta), tau=0.5), abs=1e-7)
        assert values.index(max(values)) + 1 == FOUND["fastest"][beta]


def test_from_a_gaussian_they_fall_short_of_it_in_order():
    betas = example().BETAS
    short = {
        order: [
            (value - 1) / (hermite_growth(int(order), variance=1.0, beta=beta, tau=0.5) - 1)
            for beta, value in zip(betas, FOUND["hermite"][order], strict=True)
        ]
        for order in ("3", "4", "5")
    }
    for order in short.values():
        assert order == sorted(order, reverse=True), "the colder the more"
    for three, four, five in zip(*short.values(), strict=True):
        assert 1 > three > four > five


def test_clouds_leave_what_a_gaussian_shows_about_when_theory_says():
    low, high = FOUND["null"]
    assert low < FOUND["skewness"]["middle"][0] < high
    assert FOUND["skewness"]["low"][-1] > 100 * high
    half = next(t for t, s in zip(FOUND["times"], FOUND["skewness"]["middle"], strict=True) if s >= 1)
    assert half == pytest.approx(FOUND["escape"] / 2, rel=0.2)
