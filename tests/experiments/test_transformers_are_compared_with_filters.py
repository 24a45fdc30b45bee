"""Series have the moments of their system, statistics find what is planted, and decisions can go either way."""

from dataclasses import replace

import pytest
import torch

from experiments.filtering import experiment
from experiments.filtering.decoding import attention_features, decoded, quadratic_window
from experiments.filtering.experiment import REDUCED, Arm, decisions, measured
from experiments.filtering.systems import SYSTEMS, Reference, drawn
from experiments.transformer import ModelSettings, Transformer


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_series_have_the_variance_of_their_system():
    y = drawn(SYSTEMS["outliers"], 20_000, torch.Generator().manual_seed(0)).observations
    state = 1.0
    for t in range(3):
        state = 0.95**2 * state + 0.1
        assert y[:, t].var().item() == pytest.approx(state + (0.05 + 4) / 2, rel=0.06)


def test_modes_stay_as_often_as_they_should():
    modes = drawn(SYSTEMS["turns"], 5000, torch.Generator().manual_seed(0)).modes
    assert (modes[:, 1:] == modes[:, :-1]).double().mean().item() == pytest.approx(0.9, abs=0.01)


def test_errors_are_attributed_to_the_filter_that_makes_them():
    parts = {name: randn(50, 12, 2, seed=i) for i, name in enumerate(("exact", "linear", "gpb1", "imm"))}
    known = Reference(randn(50, 12, 2), torch.rand(50, 12), torch.rand(50, 12), parts)
    own = measured(parts["imm"], known)
    assert own["errors"] == pytest.approx({"linear": 0, "gpb1": 0, "imm": 1}, abs=1e-9)
    assert measured(parts["linear"], known)["relative error"] == pytest.approx(1)
    assert measured(parts["exact"], known)["relative error"] == pytest.approx(0)
    half = measured(parts["exact"] + 0.5 * (parts["imm"] - parts["exact"]), known)
    assert half["errors"]["imm"] == pytest.approx(0.5)


def test_read_outs_find_what_is_there_and_nothing_else():
    X = randn(200, 8, 5)
    target = X @ randn(5, seed=1) + 0.5 * randn(200, 8, seed=2)
    explained = 1 - 0.25 / (randn(5, seed=1).square().sum() + 0.25)
    found = decoded(X, target, 120)  # plain-words: ok
    assert found.r2 == pytest.approx(float(explained), abs=0.03)
    assert found.null < 0.05
    assert decoded(X, randn(200, 8, seed=3), 120).r2 < 0.02
    assert decoded(X, torch.arange(8.0).expand(200, 8) + target, 120).r2 == pytest.approx(found.r2)


def test_windows_hold_the_last_observations_and_their_products():
    y = randn(3, 6, 1)
    features = quadratic_window(y, window=2)
    assert torch.allclose(features[:, 3, :2], y[:, 2:4, 0])
    assert torch.allclose(
        features[:, 3, 2:], torch.stack((y[:, 2] ** 2, y[:, 2] * y[:, 3], y[:, 3] ** 2), -1).squeeze(1)
    )
    assert (features[:, 0, 0] == 0).all()


def test_attention_features_are_those_of_the_layer():
    model = Transformer(ModelSettings(2, 6, width=8, heads=2, layers=1, hidden=8, numbers=True), seed=0)
    y = randn(3, 6, 2).float()
    with torch.no_grad():
        lags, variances = attention_features(model, y)
        block = model.blocks[0]
        x = block.before[0](model.embed(y))
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        reference = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        reference.load_state_dict(block.attention.layer.state_dict())
        weights = reference(x, x, x, attn_mask=mask, average_attn_weights=False)[1]
        v = (x @ reference.in_proj_weight[16:].mT + reference.in_proj_bias[16:]).unflatten(-1, (2, 4)).transpose(1, 2)
        for t in range(6):
            by_lag = lags[:, t].unflatten(-1, (2, 6))
            assert torch.allclose(by_lag[..., : t + 1].flip(-1), weights[:, :, t, : t + 1], atol=1e-6)
            assert (by_lag[..., t + 1 :] == 0).all()
            p = weights[:, :, t].unsqueeze(-1)
            mean = (p * v).sum(-2, keepdim=True)
            spread = (p * (v - mean).square()).sum((-1, -2))
            if t > 0:  # the first token attends to itself alone
                assert torch.allclose(variances[:, t], spread.log(), atol=1e-3)


def planted(error, coefficient, r2=0.8, random=0.5):
    def parts(value):
        both = {"r2": value, "null": 0.01}
        return {name: {"modes": both, "uncertainty": both} for name in ("stream 2", "weights", "dropped variance")}

    rows, filters = [], {}
    for system in SYSTEMS:
        filters[system] = {n: {"relative error": e} for n, e in (("gpb1", 0.2), ("imm", 0.05), ("gpb2", 0.0))}
        filters[system]["quadratic read-out"] = {"r2": 0.7}
        for seed in range(5):
            e = 0.001 * (seed - 2)
            rows.append(
                {
                    **Arm(system, "softmax", 2)._asdict(),
                    "seed": seed,
                    "relative error": error + e,
                    "errors": {"imm": coefficient + e},
                    "read-outs": parts(r2 + e),
                    "random weights": parts(random),
                }
            )
    return decisions(rows, filters)


def test_decisions_follow_the_plan():
    question = "The transformer learns IMM"
    assert planted(0.05, 0.9)[question] == "yes"
    assert planted(0.05, 0.1)[question] == "no"
    assert planted(0.15, 0.9)[question] == "inconclusive"
    arm = planted(0.15, 0.1)["turns, softmax, 2 layers"]
    assert [arm[f"H1 against {name}"]["verdict"] for name in ("gpb1", "imm", "gpb2")] == ["better", "worse", "worse"]
    assert arm["H3 modes in the stream"]["verdict"] == "supported"
    assert arm["H3 against the quadratic read-out"]["verdict"] == "more"
    assert (
        planted(0.1, 0.1, r2=0.52)["turns, softmax, 2 layers"]["H4 modes in the attention weights"]["verdict"]
        == "refuted"
    )


def test_a_small_form_runs_and_filters_are_near_the_exact_one(tmp_path):
    arms = (Arm("outliers", "softmax", 2), Arm("outliers", "moment", 2))
    settings = replace(REDUCED, arms=arms, steps=10, series=40, fitted=25)
    results = experiment.run(settings, tmp_path)
    errors = {name: row["relative error"] for name, row in results["filters"]["outliers"].items() if "errors" in row}
    assert errors["gpb2"] < errors["imm"] < errors["gpb1"] < errors["linear"] == 1
    assert len(results["models"]) == 4
    assert "variance 2" in results["models"][-1]["read-outs"]
    assert results["answer"]["status"].startswith("preliminary")
