"""The keys that hold nine tenths of the weight are counted as numpy counts them; heads are described by them."""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.events import Attended
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import hopfield
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.statistics import merge
from support.architectures import ARCHITECTURES
from support.planted.rows import VOCABULARY, decoder, encoder
from support.pretrained import minilm
from support.probe_models import details_of, judged, remarks_of, state_of, token_batches

NOTHING = Probed("", None, {}, 0)


@pytest.mark.parametrize("which", ["minilm", "decoder"])
def test_rows_are_counted_as_numpy_counts_them(which, monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    if which == "minilm":
        model, inputs = minilm("sdpa")
        batch = Batch(dict(inputs), torch.arange(1, 4), 0, ["", "", ""], torch.zeros(3, dtype=torch.int64))
    else:
        model, batch = decoder(sharpness=4.0, key_heads=2), token_batches(VOCABULARY, batches=1, length=40)[0]
    layout = discover(model, batch.inputs)
    found = {
        (m.layer, m.head, m.quantity): m for m in hopfield.evaluate(state_of(hopfield, model, [batch], layout), NOTHING)
    }
    name = layout.attention[1]
    event = capture(model, batch.inputs, architecture=layout).attention[name]
    real = batch.inputs["attention_mask"].bool()
    k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1).double()
    q, beta = event.query.double(), event.arguments.scale
    rows = {}
    for b, h, i in np.ndindex(*q.shape[:3]):
        seen = real[b] & (torch.arange(q.shape[2]) <= i if which == "decoder" else True)
        n = int(seen.sum())
        if not real[b, i] or n < 8:
            continue
        keys = k[b, h, seen]
        s = (keys @ q[b, h, i] * beta).numpy()
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        count = int(np.searchsorted(np.cumsum(np.sort(p)[::-1]), 0.9) + 1)
        order = np.argsort(-s)
        M = keys.norm(dim=-1).max()
        bound = 2 * M * (n - 1) * math.exp(s[order[1]] - s[order[0]])
        rows.setdefault(h, []).append((count / n, count, float(bound < M)))
    for h, each in rows.items():
        held, counts, retrieved = np.array(each).T
        assert found[name, h, "held"].value == pytest.approx(held.mean(), rel=2e-3)
        assert found[name, h, "keys held"].value == pytest.approx(counts.mean(), rel=2e-3)
        assert found[name, h, "retrieval"].value == pytest.approx(retrieved.mean(), abs=2e-3)
        shares = [(held > 1 / 2), (held > 1 / 8) & (held <= 1 / 2), (held > 1 / 32) & (held <= 1 / 8), held <= 1 / 32]
        for label, share in zip(hopfield.CLASSES, shares, strict=True):
            assert found[name, h, f"class {label}"].value == pytest.approx(share.mean(), abs=2e-2)
        middle = 1 + sum(np.median(held) <= bound for bound in (1 / 2, 1 / 8, 1 / 32))
        if abs(np.median(held) - 1 / 2) > 0.02 and abs(np.median(held) - 1 / 8) > 0.01:
            assert found[name, h, "class"].value == middle
        assert found[name, h, "rows against theorems"].value == 0


def test_a_learned_sink_is_one_more_pattern(monkeypatch):
    """Against the definition, with a key of zeros whose logit is the sink; both theorems hold with it."""
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    model = next(a for a in ARCHITECTURES if a.name == "gpt_oss").build()
    (batch,) = token_batches(64, batches=1, rows=3, length=30)
    layout = discover(model, batch.inputs)
    name = layout.attention[1]
    state = state_of(hopfield, model, [batch], layout)
    found = {(m.layer, m.head, m.quantity): m.value for m in hopfield.evaluate(state, NOTHING)}
    event = capture(model, batch.inputs, architecture=layout).attention[name]
    sinks, beta = event.arguments.sinks.detach().double(), event.arguments.scale
    k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1).double()
    q, real = event.query.double(), batch.inputs["attention_mask"].bool()
    held = {}
    window = model.config.sliding_window if model.config.layer_types[1] == "sliding_attention" else 99
    for b, h, i in np.ndindex(*q.shape[:3]):
        if not real[b, i]:
            continue
        first = max(0, i - window + 1)
        s = np.append((k[b, h, first : i + 1] @ q[b, h, i] * beta).detach().numpy(), float(sinks[h]))
        total = np.log(np.exp(s - s.max()).sum()) + s.max()
        assert total == pytest.approx(float(event.attention.log_normalizer[b, h, i]), abs=1e-4)
        if len(s) >= 8:
            p = np.sort(np.exp(s - total))[::-1]
            held.setdefault(h, []).append((np.searchsorted(np.cumsum(p), 0.9) + 1) / len(s))
    assert len(held) == 4
    for h, each in held.items():
        assert found[name, h, "held"] == pytest.approx(np.mean(each), rel=2e-3)
    assert all(value == 0 for (_, _, quantity), value in found.items() if quantity == "rows against theorems")


def test_sharp_heads_retrieve_and_even_ones_average():
    batches = token_batches(VOCABULARY, length=64)
    draws = [encoder(sharpness=0.5, seed=seed) for seed in range(1, 7)]
    sharp = judged(hopfield, encoder(sharpness=6.0), batches, matched=draws)
    assert sharp.verdict == "described", sharp
    assert details_of(sharp)["class I"].count == 0
    assert all(f.value < f.null_low for f in sharp.findings if f.quantity == "held")
    even = judged(hopfield, encoder(sharpness=0.1), batches, matched=draws)
    assert [(d.key, d.count, d.total) for d in even.details][:2] == [("class I", 8, 8), ("class II", 0, 8)]
    assert all(f.value > f.null for f in even.findings if f.quantity == "held")


def test_the_theorems_are_checked_on_what_was_captured(monkeypatch):
    from gradlogz.probing.predictions.observables.attention_rows import Rows

    batches = token_batches(VOCABULARY, length=64)
    whole = Rows.averaged
    monkeypatch.setattr(Rows, "averaged", lambda rows, weights, vectors: 3 * whole(rows, weights, vectors))
    assert remarks_of(judged(hopfield, encoder(sharpness=2.0), batches))["theorem_violated"].numbers["rows"] > 0


def test_layers_that_write_their_own_softmax_are_not_judged():
    def change(event):
        if not isinstance(event, Attended):
            return event
        return event._replace(call=event.query @ event.key.mT)

    found = judged(hopfield, encoder(), token_batches(VOCABULARY), change=change)
    assert found.verdict == "not applicable"
    assert {f.verdict for f in found.findings} == {"not applicable"}


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY, length=48), decoder(key_heads=2)
    layout = discover(model, batches[0].inputs)
    whole, even, odd = (state_of(hopfield, model, b, layout) for b in (batches, batches[::2], batches[1::2]))
    one, two = (hopfield.evaluate(state, NOTHING) for state in (whole, merge(even, odd)))
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        np.testing.assert_allclose(a[3:7], b[3:7], rtol=1e-9, atol=1e-10)
