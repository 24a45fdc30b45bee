"""The numbers drawn in docs/pictures/contrastive_shell.svg can be measured again, and say what the page says."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from scipy import stats

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs" / "pictures" / "contrastive_shell.json").read_text())


@pytest.fixture(scope="module")
def shell():
    spec = importlib.util.spec_from_file_location("contrastive_shell", ROOT / "examples" / "contrastive_shell.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # scipy announces another form of its result
def test_the_statistic_is_that_of_scipy(shell):
    z = torch.randn(500, 3, dtype=torch.float64).exp()
    factor = 1 + 0.75 / 500 + 2.25 / 500**2
    for column, found in zip(z.mT, shell.anderson_darling(z), strict=True):
        assert float(found) == pytest.approx(factor * stats.anderson(column.numpy()).statistic, rel=1e-9)


def test_a_gaussian_passes_as_often_as_it_should(shell):
    z = torch.randn(1000, 2000, dtype=torch.float64)
    share = float((shell.anderson_darling(z) < shell.CRITICAL).double().mean())
    assert 0.93 < share < 0.97  # 19 in 20, four standard errors are 0.02


def test_untrained_encoders_give_the_same_numbers(shell):
    for source in FOUND:
        rows = [shell.measured(source, "untrained", seed) for seed in range(shell.SEEDS)]
        for name in rows[0]:
            for part, value in shell.interval([row[name] for row in rows]).items():
                assert value == pytest.approx(FOUND[source]["untrained"][name][part], rel=1e-3, abs=0.02)


def test_the_quantile_is_that_of_scipy(shell):
    assert pytest.approx(stats.t.ppf(0.975, shell.SEEDS - 1), abs=1e-3) == shell.STUDENT


def test_the_page_says_what_was_found():
    page = " ".join((ROOT / "docs" / "contrastive.md").read_text().split())
    for source, by in FOUND.items():
        cells = [f"{by[o][n]['mean']:.2f} ± {by[o][n]['half width']:.2f}" for n in ("variation", "passed") for o in by]
        assert f"| {source} | {' | '.join(cells)} |" in page


def test_the_differences_are_as_the_page_says():
    """InfoNCE against the untrained encoder of the same seed: both statistics improve except for sparse, 64."""
    for source, by in FOUND.items():
        for name, sign in (("variation, change", -1), ("passed, change", 1)):
            change = by["info_nce"][name]
            beyond = sign * change["mean"] - change["half width"] > 0
            assert beyond == (source != "sparse, 64")
        assert by["labels"]["variation, change"]["mean"] - by["labels"]["variation, change"]["half width"] > 0
