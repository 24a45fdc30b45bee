"""Only predictions are evidence: self-checks pass or fail, descriptions have no verdict, errors lose nothing else."""

import math
from dataclasses import replace

import pytest
import torch

from gradlogz.probing import run_probe
from gradlogz.probing.hypothesis_tests import (
    Bounds,
    beyond_the_null,
    conclude,
    describe,
    judge,
    judge_against_null,
    median_interval,
)
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.judgement import Measured, graded
from gradlogz.probing.runs.records import BEYOND, DESCRIPTIVE, KINDS, PREDICTED, SELF_CHECK, Finding
from gradlogz.reporting.findings_wording import cautions, profile, verdict_sentence
from gradlogz.special.distributions import student_p, student_quantile
from support.planted.matrices import VOCABULARY, gpt2, tied
from support.probe_models import token_batches

KNOWN = {p.name: p for p in known_predictions()}


def inputs():
    """One batch: every row is a document, and batches are divided into groups of documents."""
    return [batch.inputs for batch in token_batches(VOCABULARY, rows=32, length=24, batches=1)]


def model():
    return gpt2(0, lambda g, gain: tied(g, gain))


def row(value, low, high, head=0, **fields):
    return Finding("m", "p", "a", 1, head, "x", value, low, high, tokens=9, **fields)


def test_every_claim_has_a_kind():
    kinds = {name: p.declaration.kind for name, p in KNOWN.items()}
    assert set(kinds.values()) == set(KINDS)
    assert [name for name, kind in kinds.items() if kind == SELF_CHECK] == ["identity"]
    assert {
        "ascent",
        "tie",
        "qk_geometry",
        "link",
        "gaussian_measure",
        "expansion",
        "pair_energy",
    } == {name for name, kind in kinds.items() if kind == PREDICTED}
    beyond = {"entropy", "dropped_covariance", "feed_forward_hopfield"}
    assert beyond == {name for name, kind in kinds.items() if kind == BEYOND}


def test_a_descriptive_claim_has_no_verdict_whatever_its_file_returns():
    rows = [row(1.0 + head, 0.9 + head, 1.1 + head, head) for head in range(3)]
    ruled = judge(rows, "x", lambda f: Bounds(0.5, 0.5))
    judgement = conclude(ruled, "x")
    assert (judgement.verdict, judgement.supported) == ("supported", 3)
    described = graded(judgement, DESCRIPTIVE)
    assert (described.verdict, described.supported, described.refuted, described.judged) == ("described", 0, 0, 3)
    assert {f.verdict for f in described.findings} == {"described"}
    assert described.value == judgement.value == 2.0
    assert described._replace(details=()) == describe(rows, "x")
    assert graded(judgement, PREDICTED) == judgement
    assert graded(judgement, SELF_CHECK).verdict == "passed"
    assert graded(judgement._replace(verdict="refuted"), SELF_CHECK).verdict == "failed"


def test_the_headline_counts_predictions_only():
    declarations = {name: p.declaration for name, p in KNOWN.items()}
    wanted = ["identity", "ascent", "entropy", "linearity"]
    findings = run_probe.probe(model(), None, inputs(), predictions=wanted, draws=2)
    claims = findings.summary()
    verdicts = {claim.prediction: claim.verdict for claim in claims}
    assert verdicts["identity"] == "passed"
    assert verdicts["linearity"] == "described"
    sentence = verdict_sentence("m", claims, declarations)
    assert sentence.startswith("1 prediction of the theory tested on m:")
    assert "Self-check “Attention is a gradient”: passed." in sentence
    assert "Described without a test: 1." in sentence
    assert "2 verdicts are counted; the probability of a false one is at most 5 %" in sentence
    lines = str(findings).splitlines()
    assert "self-check (1)" in lines
    assert "beyond the theory (1)" in lines
    assert "described (1)" in lines


def test_a_prediction_that_raises_loses_nothing_else():
    def fails(*_):
        raise ZeroDivisionError("no layer is left")

    broken = replace(KNOWN["ascent"], name="broken")
    measured = run_probe.measure(model(), None, inputs(), predictions=[KNOWN["entropy"], broken], draws=2)
    for function in ("evaluate", "null", "verdict"):
        wanted = [KNOWN["entropy"], replace(broken, **{function: fails})]
        findings = run_probe.evaluate(measured, predictions=wanted)
        claims = {claim.prediction: claim for claim in findings.claims}
        assert claims["broken"].verdict == "failed"
        assert claims["broken"].text == "ZeroDivisionError: no layer is left"
        assert claims["entropy"].judged
        assert claims["identity"].verdict == "passed"
        assert "no layer is left" in str(findings)
        assert "Failed with an error: " in verdict_sentence("m", findings.summary(), findings.declarations)


def test_values_that_are_no_numbers_are_not_applicable():
    rows = [row(math.nan, math.nan, math.nan, head) for head in range(3)]
    judgement = conclude(judge(rows, "x", lambda f: Bounds(0.5, 0.5)), "x")
    assert judgement.verdict == "not applicable"
    assert {f.verdict for f in judgement.findings} == {"not applicable"}


def test_p_values_have_the_degrees_of_freedom_of_their_intervals():
    """An interval of 3 groups that just excludes the bound is worth its own 5 %, and no more."""
    for freedom in (2.0, 7.0, 30.0):
        quantile = float(student_quantile(torch.tensor(freedom)))
        for p in (0.04, 0.06):
            t = next(t for t in torch.linspace(0, 60, 60001).tolist()
                     if float(student_p(torch.tensor(t), torch.tensor(freedom))) <= p)  # fmt: skip
            found = row(t, t - quantile, t + quantile, freedom=freedom)
            (judged,) = judge([found], "x", lambda f: Bounds(0.0, -1e9)).findings
            assert judged.verdict == ("supported" if p < 0.05 else "inconclusive")


def test_without_a_null_nothing_is_supported():
    rows = [row(9.0, 8.9, 9.1, freedom=20.0)]
    assert judge_against_null(rows, "x").findings[0].verdict == "inconclusive"
    known = rows[0]._replace(null=0.0, null_low=-1.0, null_high=1.0, null_freedom=9.0)
    assert judge_against_null([known], "x").findings[0].verdict == "supported"
    assert judge_against_null([known], "x", small=True).findings[0].verdict == "refuted"


@pytest.mark.parametrize("documents", [6.0, 40.0])
def test_few_documents_and_synthetic_text_are_named(documents):
    facts = {"effective_documents": documents}
    assert len(cautions(facts)) == (documents < 16)
    assert "Synthetic" in cautions({**facts, "synthetic_text": True})[-1]
    assert "bfloat16" in cautions({**facts, "dtype": "bfloat16"})[-1]
    assert cautions({**facts, "dtype": "float32"}) == cautions(facts)


def test_the_effective_number_of_documents_is_that_of_their_lengths():
    """Rows of different lengths, each a document: (sum w)² / sum w²."""
    batches = inputs()
    lengths = torch.cat([each["attention_mask"].sum(-1) for each in batches]).double()
    expected = float(lengths.sum().square() / lengths.square().sum())
    measured = run_probe.measure(model(), None, batches, predictions=["identity"])
    assert measured.facts["effective_documents"] == pytest.approx(expected, rel=0.25)  # known to 10 %


def test_values_by_layer_are_medians_over_heads():
    rows = [
        row(value, value, value, head, verdict="supported")._replace(layer=layer)
        for layer, values in (("a", (0.1, 0.2, 0.9)), ("b", (0.5, 0.6, 0.7)))
        for head, value in enumerate(values)
    ]
    claim = run_probe.probe(model(), None, inputs(), predictions=["identity"]).summary()[0]._replace(quantity="x")
    assert profile(claim, rows, None) == "By layer: 0.2, 0.6."
    assert profile(claim, rows[:3], None) == ""
    undefined = row(math.nan, math.nan, math.nan, 0, verdict="not applicable")._replace(layer="between")
    assert profile(claim, [*rows[:3], undefined, *rows[3:]], None) == "By layer: 0.2, –, 0.6."
    assert profile(claim, [*rows[:3], undefined], None) == ""


def test_the_interval_of_a_median_is_that_of_its_values_if_they_move_together():
    replicates = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [Measured("a", h, "x", float(h), 0.0, 1.0, 5, 30.0, h + replicates) for h in range(5)]
    one = median_interval(rows[2:3])
    assert median_interval(rows) == pytest.approx(one)
    exact = [Measured("a", h, "x", float(h), float(h), float(h)) for h in range(5)]
    assert median_interval(exact) == (2.0, 2.0)
    assert all(map(math.isnan, median_interval([Measured("a", 0, "x", 1.0, 0.0, 2.0)])))
    assert all(map(math.isnan, median_interval([])))


def test_the_end_of_an_interval_that_faces_the_null_counts():
    near, far = (
        row(0.0, *ends, null=1.0, null_low=0.9, null_high=1.1, freedom=30.0) for ends in ((-10, 0.1), (-0.1, 10))
    )
    assert judge_against_null([near], "x").findings[0].verdict == "refuted"
    assert judge_against_null([far], "x").findings[0].verdict == "inconclusive"


def test_without_a_null_nothing_is_supported_or_refuted():
    assert beyond_the_null(row(1.0, 0.9, 1.1), 0.05) == (math.inf, -math.inf)
    known = row(1.0, 0.9, 1.1, null=0.0, null_low=-0.1, null_high=0.2)
    assert beyond_the_null(known, 0.05) == (0.2, -0.1)
