"""Landmarks of curves with known peaks, decisions that can go either way, and one real run."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from experiments.specific_heat import experiment
from experiments.specific_heat.experiment import (
    DELAYED,
    EXTENDED,
    FULL,
    REDUCED,
    decisions,
    heat_of,
    landmarks,
    member,
    published_onset,
    rank_correlation,
)
from experiments.tasks import ModularAddition
from experiments.transformer import ModelSettings, Transformer


def curve(peak, onset, last=1.0, steps=101):
    """Rows every ten steps: heat with a triangular peak of height 2, accuracies that jump."""
    return [
        {
            "step": 10 * i,
            "heat": max(last, 2 - abs(i - peak / 10) / 10),
            "train_accuracy": float(10 * i >= 50),
            "test_accuracy": float(onset is not None and 10 * i >= onset),
        }
        for i in range(steps)
    ]


def row(kind, seed, peak, onset, last=1.0):
    return {"p": 59, "kind": kind, "seed": seed, **landmarks(curve(peak, onset, last))._asdict()}


def decided(peak, null_peak, onset=600, null_last=1.0):
    rows = []
    for seed in range(5):
        rows.append(row("generalising", seed, peak + 10 * (seed % 3), onset + 10 * (seed % 2)))
        rows.append(row("no decay", seed, null_peak + 10 * (seed % 3), None, null_last))
        rows.append(row("few pairs", seed, null_peak + 10 * (seed % 3), None, null_last))
    return decisions(rows)


def test_landmarks_are_those_of_the_curve():
    found = landmarks(curve(200, 600))  # plain-words: ok
    assert (found.peak, found.memorised, found.onset) == (200, 50, 600)
    assert found.lag == pytest.approx(math.log2(3))
    smoothed = (2 + 1.9 + 1.9) / 3
    assert found.prominence == pytest.approx(math.log2(smoothed))
    assert landmarks(curve(200, None)).lag is None


def test_a_peak_that_other_runs_lack_is_a_precursor():
    assert decided(200, 900)["verdict"] == "precursor"


def test_a_peak_that_runs_without_generalisation_share_is_none():
    answer = decided(200, 200)
    assert answer["H1 peak before onset"]["verdict"] == "supported"
    assert answer["H2 specific, against no decay"]["verdict"] == "not specific"
    assert answer["verdict"] == "no precursor"


def test_a_peak_after_the_onset_is_none():
    assert decided(800, 200)["H1 peak before onset"]["verdict"] == "refuted"
    assert decided(800, 200)["verdict"] == "no precursor"


def test_a_peak_within_a_factor_of_two_of_the_onset_is_none_in_the_later_forms():
    rows = [row("generalising", seed, 380 + 20 * seed, 420) for seed in range(5)]
    answer = decisions(rows, small_lags=True)
    lag = answer["H1 peak before onset"]["lag (log2)"]
    assert lag["low"] < 0 < lag["high"]
    assert answer["H1 peak before onset"]["verdict"] == "no lag of interest"
    assert answer["verdict"] == "no precursor"
    assert decisions(rows)["H1 peak before onset"]["verdict"] == "inconclusive"
    assert [form.small_lags for form in (REDUCED, EXTENDED, DELAYED, FULL)] == [False, False, True, True]


def onsets(*steps, memorised=500):
    return [{"kind": "generalising", "onset": step, "memorised": memorised} for step in steps]


def test_published_onsets_are_compared_by_the_interval_of_one_more_run():
    steps = [8000, 9000, 9500, 10000, 11000]
    compared = published_onset(onsets(*steps))
    assert compared["verdict"] == "reproduced"
    logarithms = torch.tensor(steps, dtype=torch.float64).log2()
    arm = stats.t.ppf(0.975, 4) * float(logarithms.std()) * math.sqrt(1 + 1 / 5)
    expected = [2 ** (float(logarithms.mean()) + sign * arm) for sign in (-1, 1)]
    assert compared["onset, prediction interval"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (onsets(2000, 2100, 2200, 2000, 2100), "not reproduced"),  # too early
        (onsets(2000, 9000, 20000, 4000, 15000), "not reproduced"),  # nothing is excluded
        (onsets(9000, 9500, 10000, 9100, 9900, memorised=3000), "not reproduced"),  # memorised too late
        (onsets(9000, 9500, 10000, 9100, 9900, memorised=None), "not reproduced"),
        (onsets(9000, 9500, 10000, 9100, None), "not judged"),
    ],
)
def test_published_onsets_may_fail_to_be_reproduced(rows, verdict):
    assert published_onset(rows)["verdict"] == verdict


def test_initial_weights_are_those_of_the_published_code(tmp_path):
    model = member(113, "generalising", 500, DELAYED, tmp_path).model
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not bool(parameter.any())
        else:
            expected = (114 if name == "unembedding.weight" else 128) ** -0.5
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.15)
    assert isinstance(model.blocks[0].feed_forward[1], torch.nn.ReLU)


def test_runs_that_are_not_as_their_kind_expects_are_left_out():
    answer = decisions([row("generalising", seed, 200, None) for seed in range(5)])
    assert answer["verdict"] == "not judged"
    assert answer["runs that are as their kind expects"]["generalising"] == "0 of 5"


def test_rank_correlations_are_those_of_scipy():
    x, y = [1.0, 5.0, 3.0, 3.0, 9.0, 7.0], [2.0, 3.0, 1.0, 4.0, 8.0, 8.0]
    correlation, p_value = rank_correlation(x, y)
    assert correlation == pytest.approx(stats.spearmanr(x, y).statistic)
    exact = stats.permutation_test(
        (x,), lambda v: stats.spearmanr(v, y).statistic, permutation_type="pairings", n_resamples=math.inf
    )
    assert p_value == pytest.approx(exact.pvalue, abs=0.02)


def test_heat_is_the_variance_of_the_logits_of_the_last_row():
    task = ModularAddition(5, 0.5, 0)
    settings = ModelSettings(
        vocabulary=6, context=3, width=8, heads=2, layers=1, contraction="none", objective="masked"
    )
    model = Transformer(settings, seed=0)
    with torch.no_grad():
        heat = heat_of(task)(model)["heat"]
        layer = model.blocks[0].attention.layer
        x = model.embed(torch.cat((task.train.tokens, task.test.tokens)))
        q, k, _ = (x @ layer.in_proj_weight.mT + layer.in_proj_bias).unflatten(-1, (3, 2, 4)).unbind(-3)
        logits = torch.einsum("bhd,bnhd->bhn", q[:, -1], k) / 2
        p = logits.softmax(-1)
        variance = (p * (logits - (p * logits).sum(-1, keepdim=True)).square()).sum(-1)
    assert heat == pytest.approx(float(variance.mean()), rel=1e-4)


def test_one_run_is_trained_and_read_again(tmp_path):
    settings = replace(REDUCED, primes=(7,), steps=40)
    curves = experiment.trained(7, "no decay", 200, settings, tmp_path)
    assert [r["step"] for r in curves] == [0, 20, 40]
    assert curves == experiment.trained(7, "no decay", 200, settings, tmp_path)
