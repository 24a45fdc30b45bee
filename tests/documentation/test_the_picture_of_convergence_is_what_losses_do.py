"""The numbers drawn in docs/pictures/contrastive_convergence.svg can be measured again, and say what the page says."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs" / "pictures" / "contrastive_convergence.json").read_text())


@pytest.fixture(scope="module")
def convergence():
    spec = importlib.util.spec_from_file_location("convergence", ROOT / "examples" / "contrastive_convergence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_losses_are_those_of_their_names(convergence):
    """Written out, pair by pair."""
    torch.manual_seed(0)
    a, b = (normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1) for _ in range(2))
    negative, T, offset = b.roll(2, 0), convergence.TEMPERATURE, torch.tensor(-1.3, dtype=torch.float64)
    s = [[float(x @ y) / T for y in b] for x in a]
    away = [float(x @ y) / T for x, y in zip(a, negative, strict=True)]
    expected = {
        "N-pair": [math.log(sum(math.exp(v - s[i][i]) for v in s[i])) for i in range(5)],
        "SigLIP": [
            sum(math.log1p(math.exp((-1 if i == j else 1) * (v - 1.3))) for j, v in enumerate(s[i])) for i in range(5)
        ],
        "N-pair, one negative": [math.log1p(math.exp(away[i] - s[i][i])) for i in range(5)],
        "Bernoulli": [math.log1p(math.exp(1.3 - s[i][i])) + math.log1p(math.exp(away[i] - 1.3)) for i in range(5)],
        "triplet": [max(0.0, -1.3 + T * (away[i] - s[i][i])) for i in range(5)],
    }
    assert set(expected) == set(convergence.LOSSES)
    for name, values in expected.items():
        measured = float(convergence.LOSSES[name](a, b, negative, offset))
        assert measured == pytest.approx(sum(values) / 5, rel=1e-9), name


@pytest.mark.parametrize("name", FOUND)
def test_training_begins_as_it_was_recorded(convergence, name):
    steps, row = 20, FOUND[name]
    curve = convergence.trained(name, row["rate"], row["setting"], convergence.SEEDS[0], steps)
    recorded = row["curves"][0][: steps // convergence.EVERY + 1]
    assert curve[0] == pytest.approx(recorded[0], abs=0.01)
    assert curve[-1] == pytest.approx(recorded[-1], abs=0.1)


def test_the_page_says_what_was_found(convergence):
    page = (ROOT / "docs" / "contrastive.md").read_text()
    for name, row in FOUND.items():
        assert len(row["curves"]) == len(convergence.SEEDS)
        summary = convergence.summary(row)
        steps, last = summary["steps"], summary["last"]
        assert f"| {steps[0]:.0f} ± {steps[1]:.0f} | {last[0]:.3f} ± {last[1]:.3f} |" in page, name


def test_one_negative_is_slower_than_all_of_them(convergence):
    """Their 95 % confidence intervals do not overlap."""
    steps = {name: convergence.summary(row)["steps"] for name, row in FOUND.items()}
    fast, slow = ("N-pair", "SigLIP"), ("N-pair, one negative", "Bernoulli", "triplet")
    assert max(sum(steps[n]) for n in fast) < min(steps[n][0] - steps[n][1] for n in slow)
