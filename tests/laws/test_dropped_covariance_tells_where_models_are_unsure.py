"""Correlations of spread and loss are those of numpy over all tokens, and models are judged by them.   [theory 8.3]"""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import dropped_covariance as dropped
from gradlogz.probing.statistics import merge, sums_of
from support.planted.rows import VOCABULARY, SureModel, decoder, encoder
from support.probe_models import findings_of, judged, state_of, token_batches

NOTHING = Probed("", None, {}, 0)


def partial(x, y, z):
    """The correlation of what a line in z leaves of x and of y."""
    left = [v - np.polyval(np.polyfit(z, v, 1), z) for v in (x, y)]
    return np.corrcoef(*left)[0, 1]


def test_correlations_are_those_of_all_tokens():
    model, batches = decoder(sharpness=2.0, key_heads=2), token_batches(VOCABULARY, batches=3)
    layout = discover(model, batches[0].inputs)
    state = state_of(dropped, model, batches, layout)
    found = {(m.layer, m.quantity): m for m in dropped.evaluate(state, NOTHING)}
    columns = {name: [] for name in (*layout.attention, "loss", "seen")}
    for batch in batches:
        captured = capture(model, batch.inputs, architecture=layout)
        ids, real = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
        counted = real[:, :-1] & real[:, 1:]
        counted[:, 0] = False
        log_p = captured.output.logits.double().log_softmax(-1)[:, :-1]
        columns["loss"] += (-log_p.gather(-1, ids[:, 1:, None]).squeeze(-1))[counted].tolist()
        columns["seen"] += torch.arange(1, ids.shape[1]).expand_as(counted)[counted].tolist()
        for name, event in captured.attention.items():
            k, v = (t.repeat_interleave(2, 1).double() for t in (event.key, event.value))
            s = event.query.double() @ k.mT * event.arguments.scale
            p = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
            trace_of = (p @ v.square() - (p @ v).square()).sum((1, 3))[:, :-1]
            columns[name] += trace_of[counted].tolist()
    loss, z = np.array(columns["loss"]), np.log(columns["seen"])
    spreads = {name: np.log(columns[name]) for name in layout.attention}
    spreads[""] = np.mean(list(spreads.values()), 0)
    for name, x in spreads.items():
        assert found[name, "correlation"].value == pytest.approx(np.corrcoef(x, loss)[0, 1], abs=1e-4)
        assert found[name, "partial correlation"].value == pytest.approx(partial(x, loss, z), abs=1e-4)
        assert found[name, "partial correlation"].tokens == len(loss)


def test_a_model_that_is_unsure_where_values_spread_is_told_from_others():
    batches = token_batches(VOCABULARY, rows=6, length=32, padded=False)
    found = judged(dropped, SureModel(2.0), batches)
    assert found.verdict == "supported", found
    assert found.value > 0.4
    assert abs(found.null) < 0.15
    found = judged(dropped, SureModel(-2.0), batches)
    assert found.verdict == "refuted", found
    assert found.value < -0.4


def test_models_without_a_head_for_the_next_token_are_not_judged():
    batches = token_batches(VOCABULARY)
    found = judged(dropped, encoder(), batches)
    assert found.verdict == "not applicable"
    assert [f.verdict for f in found.findings] == ["not applicable"]


def test_a_masked_head_has_a_pseudo_loss_that_is_only_told():
    from support.architectures import ARCHITECTURES

    bert = next(a for a in ARCHITECTURES if a.name == "bert").build("sdpa")
    found = judged(dropped, bert, token_batches(60))
    assert found.verdict == "not applicable"
    told = [f for f in found.findings if f.quantity == dropped.PSEUDO]
    assert len(told) == 3
    assert all(math.isfinite(f.value) and f.verdict == "" for f in told)


def drawn(source, effects, documents=40, tokens=15):
    state = {}
    for i, effect in enumerate(effects):
        x, z = source.standard_normal((2, documents, 1, tokens))
        y = effect * x + math.sqrt(1 - effect**2) * source.standard_normal(x.shape)
        both = []
        for a in (x, np.roll(x, tokens // 2, -1)):
            columns = (np.ones_like(a), a, z, y, a * a, a * z, a * y, z * z, z * y, y * y)
            both += [c.sum(-1) for c in columns]
        keys = torch.from_numpy(source.integers(0, 2**62, documents))
        one = np.stack(both, -1)
        products = sums_of(torch.from_numpy(np.concatenate((one, one), 1)), keys)
        state[i] = dropped.State("causal", "layer", products)
    return state


def rulings(states):
    return [dropped.verdict(findings_of(dropped, state, NOTHING)).verdict for state in states.values()]


def test_unrelated_losses_are_seldom_taken_for_related_ones():
    found = rulings(drawn(np.random.default_rng(0), [dropped.LEAST] * 200))
    assert found.count("supported") <= 0.05 * 200 + 2 * math.sqrt(200 * 0.05 * 0.95)


def test_the_closer_the_relation_the_more_often_it_is_found():
    found = rulings(drawn(np.random.default_rng(1), [e for e in (0.05, 0.15, 0.25, 0.4) for _ in range(15)]))
    power = [found[15 * i : 15 * i + 15].count("supported") / 15 for i in range(4)]
    assert power == sorted(power), power
    assert power[-1] > 0.9


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY), decoder()
    layout = discover(model, batches[0].inputs)
    whole, even, odd = (state_of(dropped, model, b, layout) for b in (batches, batches[::2], batches[1::2]))
    one, two = (dropped.evaluate(state, NOTHING) for state in (whole, merge(even, odd)))
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        np.testing.assert_allclose(a[3:7], b[3:7], rtol=1e-8, atol=1e-9)
