"""Numbers of rows are those of dense attention, and heads that choose are told from heads that do not."""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.batch_pass import BatchPass
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.prediction import Baseline, Probed
from gradlogz.probing.predictions import entropy
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.predictions.observables.attention_rows import keys_seen, weight_of_first
from gradlogz.probing.statistics import merge, sums_of
from support.planted.rows import VOCABULARY, decoder, encoder
from support.pretrained import minilm
from support.probe_models import (
    details_of,
    findings_of,
    judged,
    probed,
    remarks_of,
    state_of,
    token_batches,
    with_draws,
)
from support.scales import close


def padded_on_the_left(batch):
    """The same batch with its padding in front."""
    inputs = {name: t.flip(1) for name, t in batch.inputs.items()}
    return batch._replace(inputs=inputs)


@pytest.mark.parametrize("which", ["minilm", "decoder"])
def test_the_numbers_of_a_model_are_those_of_dense_attention(which, monkeypatch):
    monkeypatch.setattr(chosen_rows, "OF_MOMENTS", 1.0)
    if which == "minilm":
        model, inputs = minilm("sdpa")
        batch = Batch(dict(inputs), torch.arange(1, 4), 0, ["", "", ""], torch.zeros(3, dtype=torch.int64))
    else:
        model, batch = decoder(sharpness=3.0, key_heads=2), padded_on_the_left(token_batches(VOCABULARY, batches=1)[0])
    inputs = batch.inputs
    known = Probed("", discover(model, inputs), {}, 0)
    measured = entropy.evaluate(state_of(entropy, model, [batch], known.architecture), known)
    rows = {(m.layer, m.head, m.quantity): m for m in measured}
    captured = capture(model, inputs, architecture=known.architecture)
    real = inputs["attention_mask"].bool()
    for name in (known.architecture.attention[0], known.architecture.attention[-1]):
        event = captured.attention[name]
        k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1)
        seen = real[:, None, None, :].expand(*event.query.shape[:3], -1)
        if which == "decoder":
            seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
        s = (event.query.double() @ k.double().mT * event.arguments.scale).masked_fill(~seen, -torch.inf)
        keep = real[:, None].expand(s.shape[:3]) & seen.any(-1)
        p = s.softmax(-1)
        H = -(p * p.clamp(min=1e-300).log()).nan_to_num().sum(-1)
        n = seen.sum(-1)
        first = real.int().argmax(-1)
        sink = p.gather(-1, first[:, None, None, None].expand(*p.shape[:3], 1)).squeeze(-1)
        expected = {
            "entropy": ((H / n.clamp(min=2).log()), keep & (n > 1)),
            "max logit": (s.amax(-1), keep),
            "log normalizer": (s.logsumexp(-1), keep),
            "sink": (sink, keep),
        }
        for quantity, (value, where) in expected.items():
            for head in range(s.shape[1]):
                m = rows[name, head, quantity]
                assert m.tokens == int(where[:, head].sum())
                mean = float(value[:, head][where[:, head]].mean())
                assert m.value == pytest.approx(mean, rel=2e-5, abs=2e-5), (name, head, quantity)
        Q, K = (t.transpose(0, 1).flatten(1, 2).double()[:, real.flatten()] for t in (event.query, k))
        L = Q @ (K - K.mean(1, keepdim=True)).mT
        share = torch.linalg.svdvals(L).square()
        ranks = share.sum(-1).square() / share.square().sum(-1)
        for head, rank in enumerate(ranks.tolist()):
            assert rows[name, head, "logit rank"].value == pytest.approx(rank, rel=1e-4)
    assert all(math.isfinite(m.value) for m in rows.values())


def test_rows_see_the_keys_that_masks_leave():
    batches = token_batches(VOCABULARY, rows=3, batches=1)
    found = capture(decoder(), batches[0].inputs)
    event = found.attention["model.layers.0.self_attn"]
    real = batches[0].inputs["attention_mask"].bool()
    seen = keys_seen(event, BatchPass(batches[0])).expand(3, 4, -1)
    expected = torch.arange(1, 25).expand(3, 4, -1)
    assert torch.equal(seen.masked_fill(~real[:, None], 0), expected.masked_fill(~real[:, None], 0).float())
    s = (event.query @ event.key.mT * event.arguments.scale).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    close(weight_of_first(event)[:2], s.softmax(-1)[:2, ..., 0])


def test_a_model_that_chooses_is_told_from_one_that_does_not():
    batches = token_batches(VOCABULARY, rows=6)
    draws = [encoder(sharpness=0.5, seed=seed) for seed in range(1, 7)]
    sharp = judged(entropy, encoder(sharpness=4.0), batches, draws[0], matched=draws)
    assert sharp.verdict == "supported", sharp
    assert sharp.value < 0.6 < sharp.null
    assert details_of(sharp)["entropy of the layer"].null > 0.9
    even = judged(
        entropy, encoder(sharpness=0.01), batches, matched=[encoder(sharpness=4.0, seed=s) for s in range(1, 21)]
    )
    assert even.verdict == "refuted", even
    assert even.value > 0.99
    for other in ({}, {"baseline": draws[0]}):  # the untrained model is no null of this claim
        alone = judged(entropy, encoder(sharpness=4.0), batches, **other)
        assert alone.verdict == "inconclusive"


def test_alerts_are_those_of_the_monitor():
    batches = token_batches(VOCABULARY, rows=2)
    alerts = remarks_of(judged(entropy, encoder(sharpness=400.0), batches))
    layers = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
    assert alerts["logit_explosion"].layers == layers
    assert "entropy_collapse" in alerts
    (other,) = judged(entropy, encoder(sharpness=1.0), batches).remarks
    assert (other.key, other.numbers) == ("without_nulls", {"heads": 8})  # no draws


def drawn(source, levels, spread, documents=40, heads=6):
    """Models of one layer each whose heads have these entropies, differing by chance among heads and texts."""
    state = {}
    for i, level in enumerate(levels):
        each = level + spread * source.standard_normal(heads) + 0.05 * source.standard_normal((documents, heads))
        tokens = source.integers(5, 40, (documents, 1)) * np.ones((1, heads))
        columns = np.stack((tokens, tokens, tokens * each, *[np.zeros_like(tokens)] * 6), -1)
        keys = torch.from_numpy(source.integers(0, 2**62, documents))
        state[f"model {i}"] = entropy.LayerState(sums_of(torch.from_numpy(columns), keys), learned=False)
    return state


def rulings(models, draws):
    """Each of the models judged by itself, against draws of its matched models."""
    known = Probed("drawn", None, {}, 0)
    matched = [entropy.evaluate(state, known) for state in draws]
    baseline = with_draws(Baseline({}, known), matched, entropy.evaluate(models, known))
    rows = findings_of(entropy, models, known, baseline)
    return [entropy.verdict([f for f in rows if f.layer == name]) for name in models]


def heads_of(judgements):
    return [f.verdict for each in judgements for f in each.findings if f.quantity == "entropy"]


def test_random_models_are_seldom_taken_for_trained_ones():
    source = np.random.default_rng(0)
    found = rulings(drawn(source, [0.7] * 200, 0.03), [drawn(source, [0.7] * 200, 0.03) for _ in range(10)])
    for verdict in ("supported", "refuted"):
        assert sum(r.verdict == verdict for r in found) <= 0.025 * 200 + 2 * math.sqrt(200 * 0.025 * 0.975)
        assert heads_of(found).count(verdict) <= 0.025 * 1200 + 2 * math.sqrt(1200 * 0.025 * 0.975)


def test_the_sharper_a_model_the_more_of_its_heads_are_found():
    source = np.random.default_rng(1)
    effects = (0.0, 0.1, 0.2, 0.4)
    levels = [0.7 - effect for effect in effects for _ in range(10)]
    found = rulings(drawn(source, levels, 0.03), [drawn(source, [0.7] * 40, 0.03) for _ in range(10)])
    power = [heads_of(found[10 * i : 10 * i + 10]).count("supported") / 60 for i in range(4)]
    assert power == sorted(power), power
    assert power[0] <= 0.05
    assert power[-1] > 0.95


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY), decoder(key_heads=2)
    known = probed(model, batches[0])
    whole, even, odd = (state_of(entropy, model, b, known.architecture) for b in (batches, batches[::2], batches[1::2]))
    one, two = (entropy.evaluate(state, known) for state in (whole, merge(even, odd)))
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a[3:6], b[3:6], rtol=1e-9, atol=1e-10)
