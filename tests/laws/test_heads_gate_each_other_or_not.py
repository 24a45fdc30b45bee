"""The cost of heads that do not gate each other is that of dense log normalisers, and layers are judged by it."""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import coherence
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.statistics import merge, sums_of
from support.planted.rows import VOCABULARY, decoder, encoder, with_loud_head
from support.pretrained import minilm
from support.probe_models import findings_of, judged, state_of, token_batches

NOTHING = Probed("", None, {}, 0)


@pytest.mark.parametrize("which", ["minilm", "decoder"])
def test_costs_are_those_of_dense_attention(which, monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    if which == "minilm":
        model, inputs = minilm("sdpa")
        batch = Batch(dict(inputs), torch.arange(1, 4), 0, ["", "", ""], torch.zeros(3, dtype=torch.int64))
    else:
        model, batch = decoder(sharpness=3.0, key_heads=2), token_batches(VOCABULARY, batches=1)[0]
    layout = discover(model, batch.inputs)
    found = coherence.evaluate(state_of(coherence, model, [batch], layout), NOTHING)
    rows = {(m.layer, m.quantity): m for m in found}
    captured = capture(model, batch.inputs, architecture=layout)
    real = batch.inputs["attention_mask"].bool()
    for name in layout.attention:
        event = captured.attention[name]
        k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1).double()
        s = event.query.double() @ k.mT * event.arguments.scale
        seen = real[:, None, None, :].expand(s.shape)
        if which == "decoder":
            seen = seen & torch.ones(s.shape[-2:], dtype=torch.bool).tril()
        G = s.masked_fill(~seen, -torch.inf).logsumexp(-1)
        mean = (s * seen).sum(-1) / seen.sum(-1)
        for quantity, gates, least in (("raw cost", G, 1), ("cost", G - mean, 2)):
            log_r = gates.log_softmax(1)
            kl = -math.log(log_r.shape[1]) - log_r.mean(1)
            kept = real & (seen.sum(-1)[:, 0] >= least)
            assert rows[name, quantity].value == pytest.approx(float(kl[kept].mean()), rel=1e-4, abs=1e-5)
            assert rows[name, quantity].tokens == int(kept.sum())


def test_an_offset_of_the_keys_costs_nothing():
    model, batches = encoder(sharpness=0.5), token_batches(VOCABULARY, length=32, padded=False)
    before = judged(coherence, model, batches)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.key.bias += 3.0 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    after = judged(coherence, model, batches)
    for a, b in zip(before.findings, after.findings, strict=True):
        if a.quantity != "raw cost":
            assert a.value == pytest.approx(b.value, rel=1e-3)
        else:
            assert b.value > 2 * a.value


def test_even_heads_cost_little_and_a_loud_one_much():
    batches = token_batches(VOCABULARY, length=48)
    draws = [encoder(sharpness=0.4, seed=seed) for seed in range(1, 5)]
    even = judged(coherence, encoder(sharpness=0.4), batches, matched=draws)
    loud = judged(coherence, with_loud_head(encoder(sharpness=0.5)), batches, matched=draws)
    for described in (even, loud):
        assert (described.verdict, described.judged, described.supported, described.refuted) == ("described", 2, 0, 0)
        assert {f.verdict for f in described.findings if f.quantity == "cost"} == {"described"}
        assert described.null < 0.01
    assert even.value < 0.01
    assert loud.value > 0.5
    assert all(f.low > f.null_high for f in loud.findings if f.quantity == "cost")
    found = judged(coherence, encoder(heads=1), batches)
    assert found.verdict == "not applicable"


def drawn(source, costs, documents=40):
    state = {}
    for i, cost in enumerate(costs):
        rows = source.integers(5, 20, documents).astype(float)
        each = cost * np.exp(0.5 * source.standard_normal(documents) - 0.125)
        columns = np.stack((rows, rows * each, rows * each, rows, rows * each), -1)[:, None]
        keys = torch.from_numpy(source.integers(0, 2**62, documents))
        state[f"model {i}"] = coherence.LayerState(sums_of(torch.from_numpy(columns), keys))
    return state


def test_intervals_of_costs_cover_them():
    rows = findings_of(coherence, drawn(np.random.default_rng(0), [0.3] * 200, documents=160), NOTHING)
    costs = [f for f in rows if f.quantity == "cost"]
    covered = sum(f.low <= 0.3 <= f.high for f in costs)
    assert covered >= 0.95 * 200 - 3 * math.sqrt(200 * 0.95 * 0.05)


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY, length=48), encoder()
    layout = discover(model, batches[0].inputs)
    whole, even, odd = (state_of(coherence, model, b, layout) for b in (batches, batches[::2], batches[1::2]))
    one, two = (coherence.evaluate(state, NOTHING) for state in (whole, merge(even, odd)))
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        np.testing.assert_allclose(a[3:7], b[3:7], rtol=1e-9, atol=1e-10)
