"""mu + Sigma q: explained variances are those of dense moments; heads are compared with Gaussian keys.   [shim22]"""

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
from gradlogz.probing.predictions.observables.gaussian_keys import gaussian_row
from gradlogz.probing.statistics import merge, sums_of
from support.planted.rows import VOCABULARY, DrawnKeys, decoder, encoder, with_sink
from support.pretrained import minilm
from support.probe_models import details_of, findings_of, judged, remarks_of, state_of, token_batches


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
            queries = q[b, h, real[b]]
            formula = math.log(n) + mu @ eta + eta @ Sigma @ eta / 2
            sums.setdefault(h, []).append(
                [*((queries @ vector).square().mean() for vector in (m - mu, m - mu - Sigma @ eta, Sigma @ eta)),
                 ((queries @ (m - mu)) * (queries @ Sigma @ eta)).mean(),
                 (G - formula).square(), (G - math.log(n) - mu @ eta).square(), G - math.log(n), formula - math.log(n),
                 math.log(n) - H, float(eta @ Sigma @ eta > 2 * math.log(n))]
            )  # fmt: skip
    for h, row in sums.items():
        away, left, step, dot, wrong, first, G, formula, information, frozen = torch.tensor(row).double().T
        expected = {
            "mean explained": 1 - left.sum() / away.sum(),
            "mean cosine": dot.sum() / (away.sum() * step.sum()).sqrt(),
            "log normalizer explained": 1 - wrong.sum() / first.sum(),
            "log normalizer R²": 1 - wrong.sum() / (G - G.mean()).square().sum(),
            "log normalizer correlation": torch.corrcoef(torch.stack((G, formula)))[0, 1],
            "information": information.mean(),
            "frozen": frozen.mean(),
        }
        for quantity, value in expected.items():
            assert found[name, h, quantity].value == pytest.approx(float(value), rel=1e-3, abs=1e-4), (h, quantity)
        assert found[name, h, "mean explained"].tokens == len(row)


def test_pooled_shares_are_those_of_all_keys_and_queries(monkeypatch):
    monkeypatch.setattr(chosen_rows, "OF_MOMENTS", 1.0)
    model, batches = decoder(sharpness=2.0, key_heads=2), token_batches(VOCABULARY, batches=4, padded=False)
    layout = discover(model, batches[0].inputs)
    found = values(state_of(gaussian_measure, model, batches, layout))
    name = layout.attention[1]
    events = [capture(model, batch.inputs, architecture=layout).attention[name] for batch in batches]
    k = torch.cat([e.key for e in events]).double()
    q = torch.cat([e.query for e in events]).double() * events[0].arguments.scale
    m = torch.cat([e.attention.key_mean for e in events]).double()
    for h in range(4):
        keys, eta, mean = (t[:, i].flatten(0, 1) for t, i in ((k, h // 2), (q, h), (m, h)))
        mu, Sigma = keys.mean(0), torch.cov(keys.T, correction=0)
        left, away = ((e @ eta.T).square().sum() for e in (mean - mu - eta @ Sigma, mean - mu))
        assert found[name, h, "pooled mean explained"].value == pytest.approx(1 - float(left / away), rel=1e-5)


@pytest.mark.parametrize(("n", "d", "variance"), [(10, 4, 0.3), (24, 32, 1.0), (90, 8, 3.0), (200, 16, 9.0)])
def test_expected_sums_are_means_over_gaussian_keys(n, d, variance):
    """Keys drawn from a Gaussian, in any metric: on average both sides are equal, without knowing the Gaussian."""
    generator = torch.Generator().manual_seed(0)
    root, other = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    W = other @ other.mT
    q = torch.randn(d, generator=generator, dtype=torch.float64)
    q = q * math.sqrt(variance) / (q @ root.mT).norm()
    k = torch.randn(4000, n, d, generator=generator, dtype=torch.float64) @ root
    k = k - k.mean(1, keepdim=True)
    u = k @ q
    Sigma, v = k.mT @ k / n, u.square().mean(-1)
    step, moved = Sigma @ q, (u.softmax(-1).unsqueeze(1) @ k).squeeze(1)
    G = u.logsumexp(-1) - math.log(n)
    row = gaussian_row(torch.full_like(v, n), v, n)

    def square(x):
        return ((x @ W) * x).sum(-1)

    across = row.across * v.square() * ((W * Sigma).sum((-2, -1)) - square(step) / v) / (n - 2)
    for drawn, expected in (
        (square(moved), row.along * square(step) + across),
        (square(moved - step), row.short * square(step) + across),
        (G.square(), row.normalizer * v.square()),
        ((G - v / 2).square(), row.missed * v.square()),
    ):
        error = float((drawn - expected).std()) / math.sqrt(4000)
        assert abs(float(drawn.mean() - expected.mean())) < 4 * error + 0.03 * float(drawn.mean())


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("variance", [1.0, 2.0, 3.0, 4.0])
def test_gaussian_keys_of_finite_number_are_compatible(size, variance):
    """256 keys explain from 0.93 down to 0.57 of the variance, and so would any Gaussian keys."""
    model = DrawnKeys(lambda source, shape: source.standard_normal(shape), size, variance)
    found = judged(gaussian_measure, model, token_batches(20_000, length=256, padded=False))
    assert (found.verdict, found.refuted, details_of(found)["compatible"].count) == ("inconclusive", 0, 4), found
    assert abs(found.value) < 0.02


def student(source, shape):
    return source.standard_t(4, shape) / math.sqrt(2)


def of_random_length(source, shape):
    return source.standard_normal(shape) * np.exp(0.5 * source.standard_normal((shape[0], 1)) - 0.25)


def in_two_clusters(source, shape):
    return 0.5 * source.standard_normal(shape) + math.sqrt(0.75) * source.choice([-1.0, 1.0], (shape[0], 1))


@pytest.mark.parametrize("draw", [student, of_random_length, in_two_clusters])
def test_other_keys_are_refuted(draw):
    found = judged(gaussian_measure, DrawnKeys(draw, 32, 2.0), token_batches(20_000, rows=8, length=256, padded=False))
    assert found.verdict == "refuted", found
    assert found.value > 0.2


def test_gaussian_keys_of_a_transformer_are_judged_to_be_so():
    found = judged(gaussian_measure, encoder(sharpness=1.2, width=64), token_batches(VOCABULARY, length=128, rows=6))
    assert found.verdict == "inconclusive", found
    compatible = details_of(found)["compatible"]
    assert compatible.count == compatible.total > 0


def test_sinks_are_judged_to_be_no_gaussian():
    batches = token_batches(VOCABULARY, length=64)
    for size in (4.0, 7.0, 10.0):
        found = judged(gaussian_measure, with_sink(encoder(layers=1, width=128), size), batches)
        assert found.verdict == "refuted", found


def test_frozen_rows_cannot_be_compatible():
    found = judged(gaussian_measure, encoder(sharpness=10.0), token_batches(VOCABULARY, length=64))
    assert details_of(found)["compatible"].count <= 2, found
    assert remarks_of(found)["too_sharp"].numbers["heads"] >= 6


def test_where_weights_are_even_nothing_is_said():
    found = judged(gaussian_measure, encoder(sharpness=0.1), token_batches(VOCABULARY, length=64))
    assert found.verdict == "inconclusive"
    assert remarks_of(found)["too_even"].numbers == {"heads": 8}
    assert found.details[0].value > 0.98


def drawn(source, deficits, documents=40, heads=6):
    """Models of one layer each with this deficit against Gaussian keys, differing from text to text."""
    state = {}
    for i, deficit in enumerate(deficits):
        rows = source.integers(5, 20, (documents, 1)) * np.ones((1, heads))
        columns = np.zeros((documents, heads, 18))
        for moved, left, moved_of_gaussian, left_of_gaussian in ((1, 2, 5, 6), (7, 8, 9, 10)):
            columns[..., moved] = columns[..., moved_of_gaussian] = rows
            columns[..., left_of_gaussian] = 0.2 * rows
            columns[..., left] = rows * (0.2 + deficit + 0.2 * source.standard_normal((documents, heads)))
        columns[..., 0] = columns[..., 16] = rows
        keys = torch.from_numpy(source.integers(0, 2**62, documents))
        state[f"model {i}"] = gaussian_measure.LayerState(heads, sums_of(torch.from_numpy(columns), keys))
    return state


def rulings(state):
    rows = findings_of(gaussian_measure, state, Probed("drawn", None, {}, 0))
    return [gaussian_measure.verdict([f for f in rows if f.layer == name]) for name in state]


def heads_of(judgements):
    return [f.verdict for each in judgements for f in each.findings if f.quantity == gaussian_measure.DEFICIT]


def test_at_the_bound_models_are_seldom_judged_either_way():
    found = rulings(drawn(np.random.default_rng(0), [gaussian_measure.BOUND] * 200))
    assert sum(details_of(r)["compatible"].count for r in found) <= 0.05 * 1200
    assert heads_of(found).count("refuted") <= 0.05 * 1200
    assert {r.verdict for r in found} == {"inconclusive"}


def test_the_smaller_the_deficit_the_more_heads_are_found():
    found = rulings(drawn(np.random.default_rng(1), [deficit for deficit in (0.1, 0.05, 0.0, -0.1) for _ in range(10)]))
    power = [sum(details_of(r)["compatible"].count for r in found[10 * i : 10 * i + 10]) / 60 for i in range(4)]
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


def test_rows_without_a_number_have_none():
    """A NaN is no place of the table of expectations; other rows are not affected."""
    n, variance = torch.tensor([64.0, 64.0]), torch.tensor([1.0, math.nan])
    one, both = gaussian_row(n[:1], variance[:1], 64), gaussian_row(n, variance, 64)
    for alone, beside in zip(one, both, strict=True):
        assert torch.equal(alone[0], beside[0])
        assert beside[1].isnan()
