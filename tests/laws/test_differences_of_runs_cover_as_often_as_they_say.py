"""Differences of two runs: paired over the same documents, unpaired over others; intervals of 95 % hold the truth."""

import math

import pytest
import torch

from gradlogz.probing.hypothesis_tests import measured
from gradlogz.probing.runs.differences import differences_of_claims, differences_of_rows
from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.records import Claim, Finding
from gradlogz.probing.runs.replicates import Replicates, place_of
from gradlogz.probing.statistics import bootstrap, comoments_of, jackknife, mean, merge, sums_of

HEADS, DOCUMENTS, CORPORA = 6, 40, 100


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def run_of(estimate, fingerprint, *, replicates=True, verdict="inconclusive"):
    """Findings of one claim, the median over heads."""
    rows, stored = [], {}
    for m in measured("layer", "x", estimate, 100):
        row = Finding("model", "claim", "layer", 1, m.head, "x", m.value, m.low, m.high, tokens=100, verdict=verdict)
        row = row._replace(freedom=m.freedom)
        rows.append(row)
        if replicates:
            stored[place_of(row)] = Replicates(m.replicates, m.freedom)
    middle = float(torch.tensor([row.value for row in rows], dtype=torch.float64).quantile(0.5))
    claim = Claim("model", "claim", "", "x", middle, math.nan, math.nan, math.nan, verdict)
    return Findings({"model": {"fingerprint": fingerprint}}, rows, [claim], replicates=stored)


def bootstrapped(values, keys):
    columns = torch.stack((torch.ones_like(values), values), -1)  # documents of equal size
    return bootstrap(mean, sums_of(columns, keys))


def jackknifed(values, keys):
    states = [
        comoments_of(values[keys % 8 == g].T.unsqueeze(-1), group=g) for g in range(8) if bool((keys % 8 == g).any())
    ]
    state = states[0]
    for other in states[1:]:
        state = merge(state, other)
    return jackknife(lambda m: m.mean_x.squeeze(-1), state)


def corpora(generator):
    """Values of two models on the same documents, which vary alike, and of the second one on other documents.

    Heads are further apart than their sampling errors, so that the median is that of the same heads in most samples.
    """
    truth = torch.linspace(-0.3, 0.5, HEADS, dtype=torch.float64)
    heads = torch.linspace(-2.0, 2.0, HEADS, dtype=torch.float64)
    for _ in range(CORPORA):
        shared, others = heads + normal(generator, DOCUMENTS, HEADS), heads + normal(generator, DOCUMENTS, HEADS)
        keys, other_keys = (torch.randint(2**62, (DOCUMENTS,), generator=generator) for _ in range(2))
        noise = 0.3 * normal(generator, 3, DOCUMENTS, HEADS)
        yield truth, keys, shared + noise[0], shared + truth + noise[1], other_keys, others + truth + noise[2]


@pytest.mark.parametrize("estimate", [bootstrapped, jackknifed])
def test_intervals_of_differences_cover(estimate):
    generator = torch.Generator().manual_seed(5)
    covered = {"paired": [], "unpaired": [], "claim": []}
    widths = {"paired": [], "unpaired": []}
    for truth, keys, first, last, other_keys, elsewhere in corpora(generator):
        one, two = (run_of(estimate(values, keys), "a") for values in (first, last))
        three = run_of(estimate(elsewhere, other_keys), "b")
        for kind, other in (("paired", two), ("unpaired", three)):
            for d, true in zip(differences_of_rows(one, other, "claim"), truth.tolist(), strict=True):
                assert d.paired == (kind == "paired")
                covered[kind].append(d.low <= true <= d.high)
                widths[kind].append(d.high - d.low)
        claim = differences_of_claims(one, two)["claim"]
        covered["claim"].append(claim.low <= float(truth.median() + truth[HEADS // 2]) / 2 <= claim.high)
    shares = {kind: sum(each) / len(each) for kind, each in covered.items()}
    assert shares["paired"] == pytest.approx(0.95, abs=0.03)
    assert shares["unpaired"] == pytest.approx(0.95, abs=0.03)
    assert shares["claim"] > 0.88  # 100 corpora: 0.95 less 3 binomial deviations
    # Documents vary by 1 and the models by 0.3: pairing removes what they share.
    assert sum(widths["paired"]) < 0.5 * sum(widths["unpaired"])


def test_a_false_difference_is_rarely_significant_and_a_true_one_mostly():
    generator = torch.Generator().manual_seed(6)
    false, true = [], []
    for _, keys, first, last, _, _ in corpora(generator):
        twin = first + 0.3 * normal(generator, DOCUMENTS, HEADS)
        one, same, other = (run_of(bootstrapped(values, keys), "a") for values in (first, twin, last))
        false.append(any(d.significant for d in differences_of_rows(one, same, "claim")))
        true += [d.significant for d in differences_of_rows(one, other, "claim") if d.head in (0, HEADS - 1)]
    assert sum(false) / len(false) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / CORPORA)
    assert sum(true) / len(true) > 0.9


def test_runs_without_replicates_are_compared_unpaired():
    generator = torch.Generator().manual_seed(7)
    _, keys, first, last, _, _ = next(corpora(generator))
    one, two = (run_of(bootstrapped(v, keys), "a", replicates=False) for v in (first, last))
    pairs = zip(differences_of_rows(one, two, "claim"), one.rows, two.rows, strict=True)
    for d, a, b in pairs:
        assert not d.paired
        assert d.value == pytest.approx(b.value - a.value)
        assert d.high - d.value == pytest.approx(math.hypot(b.high - b.value, a.value - a.low))
        assert 0 < d.p <= 1
    assert math.isnan(differences_of_claims(one, two)["claim"].low)  # the claim has no interval of its own


def test_quantities_of_weights_differ_exactly():
    row = Finding("model", "claim", "layer", 1, 0, "x", 0.25, 0.25, 0.25, verdict="supported")
    one, two = (Findings({"model": {}}, [row._replace(value=v, low=v, high=v)]) for v in (0.25, 0.75))
    (d,) = differences_of_rows(one, two, "claim")
    assert (d.value, d.low, d.high, d.paired, d.significant) == (0.5, 0.5, 0.5, False, False)
    assert math.isnan(d.p)


def test_a_difference_that_is_the_same_in_all_replicates_is_not_tested():
    """A rank correlation of few depths is often the same in all replicates, which is no evidence of precision."""
    row = Finding("model", "claim", "", 1, None, "trend", -0.4, -0.5, -0.3, verdict="described", freedom=7.0)
    runs = []
    for value in (-0.4, -1.0):
        each = row._replace(value=value, low=value - 0.1, high=value + 0.1)
        stored = {place_of(each): Replicates(torch.full((8,), value), 7.0)}  # in float32, as they are stored
        runs.append(Findings({"model": {"fingerprint": "a"}}, [each], replicates=stored))
    (d,) = differences_of_rows(*runs, "claim")
    assert d.value == pytest.approx(-0.6)
    assert math.isnan(d.p)
    assert math.isnan(d.low)
    assert not d.significant


def test_rows_that_one_run_lacks_have_no_difference():
    row = Finding("model", "claim", "layer", 1, 0, "x", 0.25, 0.2, 0.3, verdict="supported", freedom=9.0)
    one = Findings({"model": {}}, [row, row._replace(head=1)])
    two = Findings({"model": {}}, [row._replace(value=0.5, low=0.4, high=0.6, verdict="refuted")])
    (d,) = differences_of_rows(one, two, "claim")
    assert (d.head, d.verdicts) == (0, ("supported", "refuted"))
    assert differences_of_rows(one, two, "other") == []
