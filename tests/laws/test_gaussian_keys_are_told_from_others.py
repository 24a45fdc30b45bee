"""mu + Sigma q: the shares explained are those of dense moments, and heads are judged by them.   [shim22, Cor. 1]"""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import gaussian_measure
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.statistics import merge, sums_of
from support.planted.rows import VOCABULARY, decoder, encoder, with_sink
from support.pretrained import minilm
from support.probe_models import findings_of, judged, remarks_of, state_of, token_batches


def case(which):
    if which == "minilm":
        model, inputs = minilm("sdpa")
        return model, [Batch(dict(inputs), torch.arange(1, 4), 0, ["", "", ""], torch.zeros(3, dtype=torch.int64))]
    return decoder(sharpness=2.0, key_heads=2), token_batches(VOCABULARY, batches=2, length=32)


def values(state, prediction=gaussian_measure):
    return {(m.layer, m.head, m.quantity): m for m in prediction.evaluate(state, Probed("", None, {}, 0))}


@pytest.mark.parametrize("which", ["minilm", "decoder"])
def test_what_is_explained_is_that_of_dense_moments(which, monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    model, batches = case(which)
    layout = discover(model, batches[0].inputs)
    found = values(state_of(gaussian_measure, model, batches, layout))
    name = layout.attention[1]
    sums = {}
    for batch in batches:
        event = capture(model, batch.inputs, architecture=layout).attention[name]
        real = batch.inputs["attention_mask"].bool()
        k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1).double()
        q = event.query.double() * event.arguments.scale
        for b, h, i in np.ndindex(*q.shape[:3]):
            seen = real[b] & (torch.arange(q.shape[2]) <= i if which == "decoder" else True)
            if not real[b, i] or seen.sum() < 8:
                continue
            keys, eta, n = k[b, h, seen], q[b, h, i], int(seen.sum())
            mu, Sigma = keys.mean(0), torch.cov(keys.T, correction=0)
            p = (keys @ eta).softmax(0)
            m, G = p @ keys, (keys @ eta).logsumexp(0)
            H = -(p * p.log()).sum()
            row = sums.setdefault(h, [])
            formula = math.log(n) + mu @ eta + eta @ Sigma @ eta / 2
            row.append(
                [*((m - mu) @ (m - mu), (m - mu - Sigma @ eta) @ (m - mu - Sigma @ eta)),
                 (G - formula).square(), (G - math.log(n) - mu @ eta).square(), G - math.log(n), formula - math.log(n),
                 H / math.log(n), math.log(n) - H, float(eta @ Sigma @ eta > 2 * math.log(n))]
            )  # fmt: skip
    for h, row in sums.items():
        away, left, wrong, first, G, formula, even, information, frozen = torch.tensor(row).double().T
        expected = {
            "mean explained": 1 - left.sum() / away.sum(),
            "log normalizer explained": 1 - wrong.sum() / first.sum(),
            "log normalizer R²": 1 - wrong.sum() / (G - G.mean()).square().sum(),
            "log normalizer correlation": torch.corrcoef(torch.stack((G, formula)))[0, 1],
            "information": information.mean(),
            "frozen": frozen.mean(),
        }
        for i, part in enumerate(gaussian_measure.BINS):
            inside = (even >= i / 4) & (even < (i + 1) / 4)
            if inside.any():
                expected[f"mean explained, entropy {part}"] = 1 - left[inside].sum() / away[inside].sum()
        for quantity, value in expected.items():
            assert found[name, h, quantity].value == pytest.approx(float(value), rel=1e-3, abs=1e-4), (h, quantity)
        assert found[name, h, "mean explained"].tokens == len(row)


def test_pooled_shares_are_those_of_all_keys_and_queries(monkeypatch):
    monkeypatch.setattr(chosen_rows, "OF_MOMENTS", 1.0)
    monkeypatch.setattr(gaussian_measure, "STEP", 1)
    model, batches = decoder(sharpness=2.0, key_heads=2), token_batches(VOCABULARY, batches=4, padded=False)
    layout = discover(model, batches[0].inputs)
    state = state_of(gaussian_measure, model, batches, layout)
    found = values(state)
    nulls = {(m.layer, m.head, m.quantity): m for m in gaussian_measure.null(state, Probed("", None, {}, 0), None)}
    name = layout.attention[1]
    events = [capture(model, batch.inputs, architecture=layout).attention[name] for batch in batches]
    k = torch.cat([e.key for e in events]).double()
    q = torch.cat([e.query for e in events]).double() * events[0].arguments.scale
    m = torch.cat([e.attention.key_mean for e in events]).double()
    within = torch.cat([(e.key - e.key.mean(0)).double() * math.sqrt(4 / 3) for e in events])
    for h in range(4):
        keys, eta, mean = (t[:, i].flatten(0, 1) for t, i in ((k, h // 2), (q, h), (m, h)))
        mu = keys.mean(0)
        sigmas = {
            "pooled": torch.cov(keys.T, correction=0),
            "within position": (d := within[:, h // 2].flatten(0, 1)).T @ d / len(d),
        }
        for kind, Sigma in sigmas.items():
            left = (mean - mu - eta @ Sigma).square().sum() / (mean - mu).square().sum()
            assert found[name, h, f"{kind} mean explained"].value == pytest.approx(1 - float(left), rel=1e-5)
        share = 1 - float(sigmas["within position"].trace() / sigmas["pooled"].trace())
        assert found[name, h, "position share"].value == pytest.approx(share, rel=1e-4, abs=1e-6)
        other = torch.cov(k[:, 1 - h // 2].flatten(0, 1).T, correction=0)
        left = (mean - mu - eta @ other).square().sum() / (mean - mu).square().sum()
        assert nulls[name, h, "pooled mean explained"].value == pytest.approx(1 - float(left), rel=1e-5)


def test_the_null_is_the_covariance_of_the_next_head(monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    model, batches = encoder(sharpness=2.0), token_batches(VOCABULARY, batches=1, padded=False)
    layout = discover(model, batches[0].inputs)
    state = state_of(gaussian_measure, model, batches, layout)
    nulls = {(m.layer, m.head, m.quantity): m for m in gaussian_measure.null(state, Probed("", None, {}, 0), None)}
    event = capture(model, batches[0].inputs, architecture=layout).attention[layout.attention[0]]
    k, q = event.key.double(), event.query.double() * event.arguments.scale
    m = (q @ k.mT).softmax(-1) @ k
    for h in range(4):
        other = k[:, h - 1] - k[:, h - 1].mean(1, keepdim=True)
        step = q[:, h] @ (other.mT @ other / k.shape[2])
        away = m[:, h] - k[:, h].mean(1, keepdim=True)
        share = 1 - float((away - step).square().sum() / away.square().sum())
        assert nulls[layout.attention[0], h, "mean explained"].value == pytest.approx(share, rel=1e-4)


def test_gaussian_keys_are_judged_to_be_so():
    found = judged(gaussian_measure, encoder(sharpness=1.2, width=64), token_batches(VOCABULARY, length=128, rows=6))
    assert found.verdict == "supported", found
    assert found.value > 0.9


def test_frozen_rows_and_sinks_are_judged_to_be_no_gaussian():
    batches = token_batches(VOCABULARY, length=64)
    found = judged(gaussian_measure, encoder(sharpness=10.0), batches)
    assert found.verdict == "refuted", found
    for size in (4.0, 7.0, 10.0):
        found = judged(gaussian_measure, with_sink(encoder(layers=1, width=128), size), batches)
        assert found.verdict == "refuted", found


def test_where_weights_are_even_nothing_is_said():
    found = judged(gaussian_measure, encoder(sharpness=0.1), token_batches(VOCABULARY, length=64))
    assert found.verdict == "inconclusive"
    assert remarks_of(found)["too_even"].numbers == {"heads": 8}
    assert found.value > 0.98


def drawn(source, shares, documents=40, heads=6):
    """Models of one layer each that explain this share, differing from text to text."""
    state = {}
    for i, share in enumerate(shares):
        rows = source.integers(5, 20, (documents, 1)) * np.ones((1, heads))
        columns = np.zeros((documents, heads, 4, 15))
        columns[:, :, 2, 0] = rows
        columns[:, :, 2, 1] = rows
        columns[:, :, 2, 2] = rows * (1 - share + 0.2 * source.standard_normal((documents, heads)))
        columns[:, :, 2, 5] = rows
        columns[:, :, 2, 6] = columns[:, :, 2, 1]
        columns[:, :, 2, 7] = columns[:, :, 2, 2]
        columns[:, :, 2, 13] = rows
        keys = torch.from_numpy(source.integers(0, 2**62, documents))
        state[f"model {i}"] = gaussian_measure.LayerState(heads, sums_of(torch.from_numpy(columns), keys))
    return state


def rulings(state):
    rows = findings_of(gaussian_measure, state, Probed("drawn", None, {}, 0))
    return [gaussian_measure.verdict([f for f in rows if f.layer == name]) for name in state]


def heads_of(judgements):
    return [f.verdict for each in judgements for f in each.findings if f.quantity == "mean explained"]


def test_at_the_bar_models_are_seldom_judged_either_way():
    found = rulings(drawn(np.random.default_rng(0), [0.8] * 200))
    assert sum(r.verdict == "supported" for r in found) <= 0.05 * 200 + 2 * math.sqrt(200 * 0.05 * 0.95)
    assert heads_of(found).count("supported") <= 0.05 * 1200
    assert heads_of(found).count("refuted") <= 0.05 * 1200


def test_the_more_is_explained_the_more_heads_are_found():
    found = rulings(drawn(np.random.default_rng(1), [share for share in (0.8, 0.85, 0.9, 0.98) for _ in range(10)]))
    power = [heads_of(found[10 * i : 10 * i + 10]).count("supported") / 60 for i in range(4)]
    assert power == sorted(power), power
    assert power[0] <= 0.05
    assert power[-1] > 0.95


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY), decoder(key_heads=2)
    layout = discover(model, batches[0].inputs)
    whole, even, odd = (state_of(gaussian_measure, model, b, layout) for b in (batches, batches[::2], batches[1::2]))
    one, two = values(whole), values(merge(even, odd))
    assert one.keys() == two.keys()
    for key, m in one.items():
        np.testing.assert_allclose(m[3:7], two[key][3:7], rtol=1e-9, atol=1e-10)
