"""Fixed maps stay fixed, and decisions of needed, linearity and contraction can go either way."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.contraction import experiment as contraction
from experiments.linearity import experiment as linearity
from experiments.needed import curvature
from experiments.needed import experiment as needed
from experiments.tasks import TextTask
from experiments.text import corpus
from experiments.training import TrainSettings, train
from experiments.transformer import ModelSettings, Transformer

SMALL = ModelSettings(vocabulary=300, context=16, width=16, heads=2, layers=1, hidden=16)
SHORT = TrainSettings(steps=3, learning_rate=3e-3, weight_decay=0.0, warm_up=1, record_every=3, save_every=100)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"), megabytes=0.3, vocabulary=300)


def test_fixed_maps_stay_as_they_are_and_others_learn(text, tmp_path):
    model = Transformer(replace(SMALL, identity="qv", frozen="k"), seed=0)
    layer = model.blocks[0].attention.layer
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    train(model, TextTask(text.train, text.held_out, 16, 4), SHORT, seed=0, folder=tmp_path)
    q, k, v = layer.in_proj_weight.chunk(3)
    assert torch.equal(q, torch.eye(16))
    assert torch.equal(v, torch.eye(16))
    assert torch.equal(k, before["in_proj_weight"].chunk(3)[1])
    assert not torch.equal(layer.out_proj.weight, before["out_proj.weight"])
    assert torch.equal(layer.in_proj_bias, before["in_proj_bias"])


def test_a_model_without_attention_does_not_see_earlier_tokens():
    model = Transformer(replace(SMALL, attention="none"), seed=0)
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 300
    assert torch.equal(model(tokens)[:, 1:], model(changed)[:, 1:])


def test_groups_of_matrices_are_disjoint_and_complete():
    model = Transformer(SMALL, seed=0)
    for group, size in (("qk", 2 * 16 * 16), ("vo", 2 * 16 * 16), ("feed-forward", 2 * 16 * 16)):
        parts = [part for name, p in model.named_parameters() for part in needed.matrices(group, name, p)]
        assert sum(part.numel() for part in parts) == size, group


def planted_needed(costs, rises=(0.1, 0.3), gap=0.5):
    rows = []
    for seed in range(5):
        e = 0.002 * (seed - 2)
        for arm in needed.ARMS:
            loss = 4 + (gap if arm == "no attention" else 0 if arm == "free" else gap * costs.get(arm, 0.05) + e)
            row = {"arm": arm, "seed": seed, "held-out loss": loss}
            if arm == "free":
                row["sensitivity"] = {"qk": rises[0] + e, "vo": rises[1] + e, "feed-forward": 0.1}
            rows.append(row)
    return needed.decisions(rows)


def test_needed_parts_are_those_that_cost():
    answer = planted_needed(
        {"identity v": 0.4, "identity qkvo": 0.9, "linear": 0.6, "random vo": 0.5, "random qk": 0.2}
    )
    assert answer["identity v"]["verdict"] == "needed"
    assert answer["identity q"]["verdict"] == "not needed"
    assert answer["linear"]["verdict"] == "worse"
    assert answer["cosine"]["verdict"] == "not worse"
    assert answer["H8 no weights do fairly well"]["verdict"] == "refuted"
    assert answer["H9 queries and keys are easier"]["verdict"] == "supported"
    assert planted_needed({}, rises=(0.3, 0.1))["H9 queries and keys are easier"]["verdict"] != "supported"
    assert planted_needed({})["H8 no weights do fairly well"]["verdict"] == "supported"
    assert planted_needed({}, gap=0.01)["verdict"] == "not judged"


def test_linearity_is_decided_as_planned():
    def decided(r2, share, closed):
        rows = []
        for seed in range(5):
            e = 0.002 * (seed - 2)
            rows.append({"seed": seed, "step": 0, "R2": 0.9, "affine share": 0, "closed form": 0, "trend": 0})
            values = {"R2": r2 + e, "affine share": share + e, "closed form": closed + e, "trend": -0.8 + e}
            rows.append({"seed": seed, "step": 300, **values})
        return [row["verdict"] for name, row in linearity.decisions(rows).items() if name.startswith("H")]

    assert decided(0.7, 0.8, -0.1) == ["supported", "supported", "supported", "supported"]
    assert decided(0.9, 0.2, 0.1) == ["refuted", "refuted", "refuted", "supported"]
    assert decided(0.85, 0.5, -0.01)[:3] == ["inconclusive"] * 3


def test_contractions_are_decided_as_planned():
    rows = []
    growths = {"layer_norm": 1.02, "dyt": 1.3, "none": 1.1}  # of text; Gaussian tokens: 1
    for seed in range(5):
        e = 0.002 * (seed - 2)
        for kind, little, much in (("layer_norm", 0, 0), ("dyt", 0.2, 0.05), ("none", -0.2, 0.0)):
            for size, cost in (("little text", little), ("much text", much)):
                loss = 4 + cost + (0 if kind == "layer_norm" else e)
                budget = {"log tr Cov": [0.7, growths[kind] - 0.7 + e], "log tr Cov, Gaussian tokens": [0.5, 0.5]}
                row = {"contraction": kind, "data": size, "seed": seed, "held-out loss": loss}
                rows.append({**row, "budget": budget if size == "much text" else {}})
    answer = contraction.decisions(rows)
    assert answer["dyt, little text"]["verdict"] == "costs"
    assert answer["none, little text"]["verdict"] == "gains"
    assert answer["none, much text"]["verdict"] == "no cost of interest"
    assert answer["dyt, regime"]["verdict"] == "effect"
    verdicts = [answer[f"{kind}, prediction"]["verdict"] for kind in growths]
    assert verdicts == ["predicted", "not predicted", "inconclusive"]
    assert answer["dyt, prediction"]["log ratio"]["mean"] == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["layer_norm", "dyt", "sphere", "whitening"])
def test_budgets_are_changes_of_the_log_variance(kind):
    model = Transformer(replace(SMALL, contraction=kind, embedding_scale=35.0), seed=0).eval()
    windows = torch.randint(300, (4, 16), generator=torch.Generator().manual_seed(0))
    values = contraction.budget(model, windows)
    before, after = (state.mean.flatten(0, 1) for state in model.states(windows))
    expected = torch.log(after.var(0).sum() / before.var(0).sum())
    assert values["log tr Cov"] == pytest.approx([expected.item()], rel=1e-4)
    assert 0 < values["normalised entropy"] <= 1
    assert 0 < values["normalised entropy, Gaussian tokens"] <= 1


def test_a_stream_of_gaussian_tokens_is_predicted_by_gaussian_tokens():
    """A model without positions whose embeddings are themselves Gaussian: text is then no other than the null."""
    settings = replace(SMALL, vocabulary=4000, embedding_scale=35.0)
    model = Transformer(settings, seed=0).eval()
    with torch.no_grad():
        model.positions.zero_()
        model.blocks[0].attention.layer.in_proj_weight.mul_(3)
    windows = torch.arange(2048).reshape(128, 16)
    values = contraction.budget(model, windows)
    assert values["log tr Cov, Gaussian tokens"] == pytest.approx(values["log tr Cov"], abs=0.02)
    for name in ("normalised entropy", "distance to a Gaussian"):
        assert values[f"{name}, Gaussian tokens"] == pytest.approx(values[name], abs=0.01)


def test_small_forms_run(text, tmp_path):
    sizes = {"model": SMALL, "training": SHORT, "batch_size": 4, "megabytes": 0.3, "seeds": 2}
    arms = ("free", "identity qkvo", "random qk", "random vo", "no attention")
    answer = needed.run(replace(needed.REDUCED, **sizes, arms=arms), tmp_path / "needed")["answer"]
    assert answer["status"].startswith("preliminary")
    kinds = ("layer_norm", "dyt", "whitening")
    settings = replace(contraction.REDUCED, **sizes, kinds=kinds)
    for form, folder in ((settings, "norms"), (replace(settings, together=True), "together")):
        results = contraction.run(form, tmp_path / folder)
        assert "dyt, regime" in results["answer"]
        assert len(results["models"]) == 2 * 2 * len(kinds)
    rows = linearity.run(replace(linearity.REDUCED, **sizes, checkpoints=(0, 3), tokens=256), tmp_path / "linearity")
    assert len(rows["models"]) == 4


class Quadratic(torch.nn.Module):
    """Parameters of known curvature, with the names of a transformer's."""

    def __init__(self):
        super().__init__()
        block = torch.nn.Module()
        block.in_proj_weight = torch.nn.Parameter(torch.randn(12, 4, dtype=torch.float64))
        block.feed_forward = torch.nn.Linear(4, 3, dtype=torch.float64)
        self.block = block


def test_curvatures_are_those_of_a_quadratic_loss():
    torch.manual_seed(0)
    model = Quadratic()
    before = model.block.in_proj_weight.detach().clone()

    def squares():
        return [float(part.detach().square().sum()) for part in model.block.in_proj_weight.chunk(3)]

    q, k, v = squares()
    found = curvature.curvatures(model, lambda: sum(map(math.prod, zip((3, 5, 7), squares(), strict=True))) / 2)
    assert found["qk"] == pytest.approx(3 * q + 5 * k, rel=1e-6)
    assert found["vo"] == pytest.approx(7 * v, rel=1e-6)
    assert found["feed-forward"] == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(model.block.in_proj_weight.detach(), before, rtol=1e-12, atol=1e-12)


def test_flatter_directions_are_decided_as_planned():
    def verdict(ratio):
        rows = [
            {"seed": s, "step": 2000, "qk": 1.0, "vo": ratio * (1 + 0.02 * (s - 2)), "feed-forward": 1.0}
            for s in range(5)
        ]
        return curvature.decisions(rows).get("flatter", {"verdict": "not judged"})["verdict"]

    assert [verdict(ratio) for ratio in (4, 1, 2, -1)] == ["supported", "refuted", "inconclusive", "not judged"]
