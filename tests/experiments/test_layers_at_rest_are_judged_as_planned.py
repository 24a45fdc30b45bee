"""Sets have their oracle, ascent is found where it is planted, and rest where there is rest; decisions can fail."""

import pytest
import torch

from experiments.rest import experiment
from experiments.rest.experiment import ascent, at_rest, decisions, iterated
from experiments.rest.layers import ARMS, CENTRES, NOISE, RestingModel, RestSettings, drawn, oracle
from experiments.tasks import generator_of


def test_the_oracle_is_the_posterior_mean_of_the_joint_gaussian():
    sets = drawn(1, generator_of(3, 0))
    tokens, labels = sets.tokens[0].double(), sets.labels[0]
    same = (labels.unsqueeze(-1) == labels).double()  # covariance of the centres of two tokens
    mean = same @ torch.linalg.solve(same + NOISE**2 * torch.eye(len(labels), dtype=torch.float64), tokens)
    assert torch.allclose(oracle(sets)[0].double(), mean, atol=1e-5)


def test_a_layer_whose_values_are_tied_ascends():
    model = RestingModel(RestSettings("shrinkage"), seed=0).double()
    layer, s = model.layer, torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.v_proj.load_state_dict(layer.k_proj.state_dict())
        layer.out_proj.weight.copy_(layer.q_proj.weight.mT)
        layer.out_proj.bias.zero_()
    cosine, permuted = ascent(model, s, torch.randn(2, 5, 16, dtype=torch.float64))
    assert cosine == pytest.approx(1, abs=1e-12)
    assert permuted < 0.999


def test_rest_is_found_where_maps_contract_and_not_where_they_turn():
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    assert iterated(lambda x: 0.5 * x + 1, x).rests.all()
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    assert not iterated(lambda x: x @ turn, x).rests.any()


@pytest.mark.parametrize("arm", ARMS)
def test_an_untrained_layer_is_measured(arm, monkeypatch):
    monkeypatch.setattr(experiment, "STEPS", 20)
    values = at_rest(RestingModel(RestSettings(arm), seed=0).double(), 2)
    assert 0 <= values["rests"] <= 1
    assert values["one attractor"] <= values["rests"]
    assert 1 <= values["clusters"] <= 24
    assert (values["certified"] is None) == (arm != "shrinkage")
    if arm == "shrinkage":
        assert values["rests"] == 1


def test_the_injection_is_what_keeps_tokens_apart():
    model = RestingModel(RestSettings("deq"), seed=0).double()
    s, x = torch.randn(2, 1, 6, 16, dtype=torch.float64)
    free = model.without_injection()
    assert torch.equal(free.layer.step(s)(x), free.layer.step(2 * s)(x))
    assert not torch.equal(model.layer.step(s)(x), model.layer.step(2 * s)(x))


def planted(rests, clusters, cosine):
    rows = []
    for arm in ARMS:
        for seed in range(5):
            e = 0.01 * (seed - 2)
            values = {"rests": rests, "one attractor": 1.0, "clusters": clusters + e, "cosine": cosine + e}
            values |= {"cosine, permuted": 0.0, "relative error": 0.1 + e}
            values |= {"certified": 0.5 + e, "collapsed without injection": 0.9 + e}
            rows.append({"arm": arm, "seed": seed, "trained": values, "untrained": values})
    return decisions(rows)


def test_decisions_follow_the_plan():
    question = "The trained fixed point is"
    assert planted(1.0, CENTRES, 0.3)[question] == "of the theory's kind"
    assert planted(1.0, CENTRES, 0.0)[question] == "of another kind"
    assert planted(1.0, 20.0, 0.3)[question] == "of another kind"
    assert planted(0.2, CENTRES, 0.3)[question] == "no rest"
    answer = planted(1.0, CENTRES, 0.3)
    assert answer["shrinkage"]["H6 certificate"]["verdict"] == "refuted"
    assert answer["deq"]["H4 collapse without injection"]["verdict"] == "supported"


def test_a_small_form_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "STEPS", 10)
    results = experiment.run(experiment.Settings(seeds=2, steps=3, sets=2), tmp_path)
    assert len(results["layers"]) == 6
    assert results["answer"]["status"].startswith("preliminary")


def test_variance_within_centres_is_that_of_the_groups():
    x = torch.tensor([[[0.0], [2.0], [10.0], [12.0]]])
    labels = torch.tensor([[0, 0, 1, 1]])
    assert experiment.within_centres(x, labels) == pytest.approx(4 / 104)
    assert experiment.within_centres(x, torch.arange(4).unsqueeze(0) % 2) == pytest.approx(100 / 104)
