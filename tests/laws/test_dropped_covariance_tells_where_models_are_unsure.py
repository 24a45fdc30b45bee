"""Correlations of spread and loss are those of numpy over all tokens, and models are judged by them.   [theory 8.3]"""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import dropped_covariance as dropped
from gradlogz.probing.statistics import Sums, merge, sample_of
from support.planted.rows import VOCABULARY, SureModel, decoder, encoder
from support.probe_models import findings_of, judged, state_of, token_batches

NOTHING = Probed("", None, {}, 0)


def partial(x, y, controls):
    """The correlation of what a linear function of the controls leaves of x and of y."""
    Z = np.stack([np.ones_like(x), *controls], 1)
    left = [v - Z @ np.linalg.lstsq(Z, v, rcond=None)[0] for v in (x, y)]
    return np.corrcoef(*left)[0, 1]


def test_correlations_are_those_of_all_tokens():
    model, batches = decoder(sharpness=2.0, key_heads=2), token_batches(VOCABULARY, batches=3)
    layout = discover(model, batches[0].inputs)
    state = state_of(dropped, model, batches, layout)
    found = {(m.layer, m.quantity): m for m in dropped.evaluate(state, NOTHING)}
    columns = {name: [] for name in (*layout.attention, "loss", "previous", "seen", "next", "token")}
    every = np.concatenate([batch.inputs["input_ids"][batch.inputs["attention_mask"].bool()] for batch in batches])
    for batch in batches:
        captured = capture(model, batch.inputs, architecture=layout)
        ids, real = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
        counted = real[:, 1:-1] & real[:, 2:]
        loss = -captured.output.logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        columns["loss"] += loss[:, 1:][counted].tolist()
        columns["previous"] += loss[:, :-1][counted].tolist()
        columns["seen"] += torch.arange(2, ids.shape[1]).expand_as(counted)[counted].tolist()
        columns["next"] += ids[:, 2:][counted].tolist()
        columns["token"] += ids[:, 1:-1][counted].tolist()
        for name, event in captured.attention.items():
            k, v = (t.repeat_interleave(2, 1).double() for t in (event.key, event.value))
            s = event.query.double() @ k.mT * event.arguments.scale
            p = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
            W = model.get_submodule(name).o_proj.weight.detach().double().mT.unflatten(0, (4, -1))
            there = v @ W
            trace_of = (p @ there.square() - (p @ there).square()).sum((1, 3))[:, 1:-1]
            columns[name] += trace_of[counted].tolist()
    loss = np.array(columns["loss"])
    often = np.bincount(every, minlength=VOCABULARY) / len(every)
    controls = [np.log(columns["seen"]), *(np.log(often[columns[name]]) for name in ("next", "token"))]
    controls.append(np.array(columns["previous"]))
    spreads = {name: np.log(columns[name]) for name in layout.attention}
    spreads[""] = np.mean(list(spreads.values()), 0)
    for name, x in spreads.items():
        assert found[name, "correlation"].value == pytest.approx(np.corrcoef(x, loss)[0, 1], abs=1e-4)
        assert found[name, "partial correlation given n"].value == pytest.approx(
            partial(x, loss, controls[:1]), abs=1e-4
        )
        assert found[name, "partial correlation"].value == pytest.approx(partial(x, loss, controls), abs=1e-4)
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


def test_a_masked_head_is_not_judged():
    from support.architectures import ARCHITECTURES

    bert = next(a for a in ARCHITECTURES if a.name == "bert").build("sdpa")
    found = judged(dropped, bert, token_batches(60))
    assert found.verdict == "not applicable"


@pytest.mark.parametrize("part", ["v_proj", "lm_head"])
def test_constant_spreads_and_constant_losses_are_not_judged(part):
    model = decoder()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if part in name:
                p.zero_()
    found = judged(dropped, model, token_batches(VOCABULARY))
    assert found.verdict == "not applicable"
    assert all(math.isnan(f.value) for f in found.findings)


def test_padding_changes_neither_values_nor_nulls():
    model, batches = decoder(sharpness=2.0), token_batches(VOCABULARY, batches=3)
    wider = [
        batch._replace(inputs={name: torch.nn.functional.pad(t, (0, 13)) for name, t in batch.inputs.items()})
        for batch in batches
    ]
    layout = discover(model, batches[0].inputs)
    states = [state_of(dropped, model, each, layout) for each in (batches, wider)]
    for function in (dropped.evaluate, lambda state, known: dropped.null(state, known, None)):
        one, two = (function(state, NOTHING) for state in states)
        assert [m[:3] for m in one] == [m[:3] for m in two]
        np.testing.assert_allclose([m[3:7] for m in one], [m[3:7] for m in two], rtol=1e-4, atol=1e-5)


def test_what_frequencies_explain_is_no_relation():
    """Rare tokens have a large loss and a large spread; given the frequency there is no relation."""
    source = np.random.default_rng(0)
    often = 1 / np.arange(1, 41)
    ids = source.choice(40, (40, 60), p=often / often.sum())
    counts = np.bincount(ids.flatten(), minlength=40)
    rarity = -np.log(counts[ids] / counts.sum())
    x, y = (rarity + 0.5 * source.standard_normal(rarity.shape) for _ in range(2))
    state = state_with(source, x, y, ids=ids, counts=counts)
    found = {m.quantity: m.value for m in dropped.evaluate(state, NOTHING) if not m.layer}
    assert found["correlation"] > 0.5
    assert found["partial correlation given n"] > 0.5
    assert abs(found["partial correlation"]) < 0.05
    assert dropped.verdict(findings_of(dropped, state, NOTHING)).verdict != "supported"


def state_with(source, x, y, ids=None, counts=None):
    """The state of one layer with these spreads and losses, [documents, tokens]; controls are noise unless given."""
    documents, tokens = x.shape
    ids = np.zeros((documents, tokens), int) if ids is None else ids
    keys = np.repeat(source.integers(0, 2**62, documents), tokens)
    numbers = np.stack((*source.standard_normal((2, *x.shape)), y), -1)
    vectors = {
        "spread": x.reshape(-1, 1),
        "other": np.roll(x, tokens // 2, -1).reshape(-1, 1),
        "numbers": numbers.reshape(-1, 3),
        "ids": np.stack((ids, source.permuted(ids)), -1).reshape(-1, 2),
        "document": keys,
    }
    vectors = {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in vectors.items()}
    sample = sample_of(vectors, torch.from_numpy(source.integers(0, 2**62, documents * tokens)), size=dropped.SAMPLE)
    counts = torch.ones(1) if counts is None else torch.from_numpy(counts).double()
    return dropped.State("causal", "layer", sample, Sums(counts.reshape(1, -1, 1)))


def drawn(source, effects, documents=40, tokens=15):
    states = {}
    for i, effect in enumerate(effects):
        x = source.standard_normal((documents, tokens))
        states[i] = state_with(source, x, effect * x + math.sqrt(1 - effect**2) * source.standard_normal(x.shape))
    return states


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
