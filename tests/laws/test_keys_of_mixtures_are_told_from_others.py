"""Mixtures of Gaussian keys: EM finds planted components, and heads are compared with keys of a mixture.   [shim22]"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from gradlogz.probing.predictions import gaussian_measure, link, mixture
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.predictions.observables.gaussian_mixture import COMPONENTS, features_of, fit_mixtures
from gradlogz.probing.predictions.observables.visible_keys import visible_keys
from gradlogz.probing.statistics import merge
from support.planted.rows import VOCABULARY, DrawnKeys, decoder, encoder, with_sink
from support.probe_models import details_of, findings_of, judged, probed, state_of, token_batches
from support.scales import close


def white(x):
    x = x - x.mean(1, keepdims=True)
    L = np.linalg.cholesky(x.transpose(0, 2, 1) @ x / x.shape[1])
    return torch.from_numpy(np.linalg.solve(L, x.transpose(0, 2, 1)).transpose(0, 2, 1).copy())


def clusters(source, heads=2, n=1200, d=4, k=4):
    """Points around k centres, with the number of their centre."""
    number = source.integers(0, k, (heads, n))
    centres = 4 * source.standard_normal((heads, k, d))
    return white(source.standard_normal((heads, n, d)) + np.take_along_axis(centres, number[..., None], 1)), number


def test_a_fit_is_a_fixed_point_of_its_definition():
    """One more step of EM, written out with densities of another library, changes nothing."""
    x, _ = clusters(np.random.default_rng(0))
    for K, fitted in fit_mixtures(x).items():
        if K not in (1, 4):  # the others have not converged
            continue
        for h in range(2):
            pi, mu, Sigma = (t[h].numpy() for t in fitted)
            joint = np.stack([pi[k] * multivariate_normal(mu[k], Sigma[k]).pdf(x[h]) for k in range(K)], -1)
            np.testing.assert_allclose(
                fitted.log_density(features_of(x))[h], np.log(joint.sum(-1)), rtol=1e-9, atol=1e-9
            )
            r = joint / joint.sum(-1, keepdims=True)
            count = r.sum(0)
            np.testing.assert_allclose(pi, (count + 1) / (len(r) + K), atol=1e-3 if K > 1 else 1e-12)
            for k in range(K):
                away = x[h].numpy() - mu[k]
                np.testing.assert_allclose(r[:, k] @ away / count[k], 0, atol=1e-3 if K > 1 else 1e-12)
                scatter = (r[:, k, None] * away).T @ away
                expected = (scatter + 2 * np.eye(4)) / (count[k] + 2)
                np.testing.assert_allclose(Sigma[k], expected, atol=1e-3 if K > 1 else 1e-12)


def test_planted_clusters_are_components():
    x, number = clusters(np.random.default_rng(1))
    four = fit_mixtures(x)[4]
    for h in range(2):
        found = torch.cdist(x[h], four.means[h]).argmin(-1).numpy()
        both = np.zeros((4, 4))
        np.add.at(both, (number[h], found), 1)
        assert both.max(0).sum() > 0.97 * len(found)


def test_the_likelihood_increases_with_components_in_sample():
    source = np.random.default_rng(2)
    x = white(source.standard_t(3, (3, 800, 5)))
    totals = [fitted.log_density(features_of(x)).sum(-1) for fitted in fit_mixtures(x).values()]
    for less, more in itertools.pairwise(totals):
        assert (more > less).all()


def test_a_fit_turns_with_its_points():
    x, _ = clusters(np.random.default_rng(3))
    Q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    for one, two in zip(fit_mixtures(x).values(), fit_mixtures(x @ Q).values(), strict=True):
        close(two.weights, one.weights, scale=1e4)
        close(two.means, one.means @ Q, scale=1e4)
        close(two.covariances, Q.mT @ one.covariances @ Q, scale=1e4)


def test_drawn_points_have_the_moments_of_the_mixture():
    x, _ = clusters(np.random.default_rng(4))
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(1, 40_000, generator=generator, dtype=torch.float64)
    normal = torch.randn(1, 40_000, 4, generator=generator, dtype=torch.float64)
    for fitted in fit_mixtures(x).values():
        drawn = fitted.drawn(uniform, normal)[:, 0]
        zero = torch.zeros(2, 1, 4, dtype=torch.float64)
        mean, covariance = fitted.measure.mean(zero).squeeze(1), fitted.measure.covariance(zero).squeeze(1)
        assert float((drawn.mean(1) - mean).abs().max()) < 0.03
        assert float((torch.stack([torch.cov(d.T) for d in drawn]) - covariance).abs().max()) < 0.06


def test_tilted_mixtures_are_limits_of_their_samples():
    """∇G_K and G_K, with the Gaussian of the other axes, against self-normalised averages of many drawn points."""
    x, _ = clusters(np.random.default_rng(5))
    fitted, generator = fit_mixtures(x)[4], torch.Generator().manual_seed(0)
    q = 0.5 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    normal = torch.randn(1, 200_000, 6, generator=generator, dtype=torch.float64)
    uniform = torch.rand(1, 200_000, generator=generator, dtype=torch.float64)
    k = torch.cat((fitted.drawn(uniform, normal[..., :4])[:, 0], normal[..., 4:].expand(2, -1, -1, -1)[:, 0]), -1)
    s = q @ k.mT
    middle = k.mean(1, keepdim=True)
    moved, height = s.softmax(-1) @ k - middle, s.logsumexp(-1) - math.log(200_000) - (middle * q).sum(-1)
    step, expected = mixture._tilted(fitted, q)
    assert float((moved - step).abs().max()) < 0.05
    assert float((height - expected).abs().max()) < 0.02


@pytest.mark.parametrize("which", ["encoder", "decoder"])
def test_sampled_rows_are_those_of_the_layer(which, monkeypatch):
    """Attended mean, log normaliser and information of each row, from the keys that it sees, by their definitions."""
    from gradlogz.probing.inside.capturing import capture

    monkeypatch.setattr(chosen_rows, "SHARE", 1 / 4)
    model = (encoder(sharpness=2.0) if which == "encoder" else decoder(sharpness=2.0, key_heads=2)).double()
    batches = token_batches(VOCABULARY, batches=1, length=32, rows=3)
    one = probed(model, batches[0])
    name = one.architecture.attention[1]
    weights = one.weights[name]._replace(rotary=False)  # as the layer has them
    rows = visible_keys(state_of(mixture, model, batches, one.architecture)[name].rows, weights)
    event = capture(model, batches[0].inputs, architecture=one.architecture).attention[name]
    q, k = event.query * event.arguments.scale, event.key.repeat_interleave(4 // event.key.shape[1], 1)
    real = batches[0].inputs["attention_mask"].bool()
    for t in range(rows.query.shape[1]):
        b = int((batches[0].keys == rows.document[t]).nonzero())
        i = int((q[b, 0] - rows.query[0, t]).norm(dim=-1).argmin())
        sees = real[b] & (torch.arange(32) <= i if which == "decoder" else True)
        for h in range(4):
            keys, n = k[b, h, sees], int(sees.sum())
            mu, u = keys.mean(0), keys @ q[b, h, i]
            p = u.softmax(0)
            close(rows.moved[h, t], p @ keys - mu, scale=100.0)
            close(rows.log_normalizer[h, t], u.logsumexp(0) - math.log(n) - mu @ q[b, h, i], scale=1e3)
            close(rows.information[h, t], math.log(n) + (p * p.log()).sum(), scale=1e3)
            assert int(rows.size[h, t].round()) == n
            seen = rows.visible[h * rows.visible.shape[0] // 4, t] + mu
            assert float((seen.unsqueeze(1) - keys).norm(dim=-1).min(-1).values.max()) < 1e-12
            close(rows.own_key[h * rows.own_key.shape[0] // 4, t], k[b, h, i] - mu, scale=100.0)


def normal(source, shape):
    return source.standard_normal(shape)


def in_two_clusters(source, shape):
    return 0.5 * source.standard_normal(shape) + math.sqrt(0.75) * source.choice([-1.0, 1.0], (shape[0], 1))


def student(source, shape):
    return source.standard_t(5, shape) / math.sqrt(5 / 3)


def of_random_length(source, shape):
    return source.standard_normal(shape) * np.exp(0.5 * source.standard_normal((shape[0], 1)) - 0.25)


def planted(draw, variance, size=32):
    return judged(mixture, DrawnKeys(draw, size, variance), token_batches(20_000, rows=8, length=256, padded=False))


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_gaussian_keys_are_near_one_component(variance):
    found = planted(normal, variance)
    assert (found.verdict, details_of(found)["within_1"].count) == ("described", 4), found
    assert abs(found.value) < 0.05
    assert details_of(found)["components"].value == 1


def test_two_clusters_are_near_two_components_and_are_no_gaussian():
    found = planted(in_two_clusters, 2.0)
    details = details_of(found)
    assert details["components"].value == 2
    assert [details[f"within_{K}"].count for K in COMPONENTS] == [0, 4, 4, 4]
    batches = token_batches(20_000, rows=8, length=256, padded=False)
    assert judged(gaussian_measure, DrawnKeys(in_two_clusters, 32, 2.0), batches).verdict == "refuted"


def test_a_sink_is_a_component():
    """One outlier of many keys, the same in all texts, is no Gaussian but one of two."""
    batches, model = token_batches(VOCABULARY, length=64, rows=8), with_sink(encoder(layers=1, width=128), 7.0)
    found = judged(mixture, model, batches)
    near = details_of(found)["within_2"]
    assert 2 * near.count > near.total, found
    assert details_of(found)["within_1"].count == 0


@pytest.mark.parametrize(("draw", "variance"), [(student, 2.0), (of_random_length, 1.0)])
def test_other_keys_have_a_deficit(draw, variance):
    found = planted(draw, variance, size=16)
    assert details_of(found)["within_1"].count == 0, found
    assert found.value > 0.2


def test_keys_whose_distribution_is_that_of_the_document_have_a_deficit():
    """Every document has keys around its own clusters: Gaussian mixtures, but not one for all texts."""

    def of_document(event):
        if not hasattr(event, "call"):
            return event
        call = event.call
        source = torch.Generator().manual_seed(int(call.query.abs().sum() * 1e3) % 2**31)
        lengths = (torch.randn(len(call.key), 1, 1, call.key.shape[-1], generator=source) / 2).exp()
        key = call.key * lengths
        from gradlogz import attend

        again = attend(call.query, key, call.value, attn_mask=call.attn_mask, scale=call.scale)
        return event._replace(call=call._replace(key=key), attention=again)

    batches = token_batches(20_000, rows=8, length=256, padded=False)
    found = judged(mixture, DrawnKeys(normal, 16, 1.0), batches, change=of_document)
    assert found.value > mixture.BOUND, found


def test_without_enough_keys_nothing_is_described():
    few = judged(mixture, encoder(), token_batches(VOCABULARY, length=32, rows=1))
    assert few.verdict == "not applicable"


@pytest.mark.parametrize("prediction", [mixture, link])
@pytest.mark.parametrize("part", ["key", "query"])
def test_a_head_without_weights_is_left_out(prediction, part):
    """Its keys are a point, or its queries 0; the other heads have the same values as before."""
    batches, found = token_batches(VOCABULARY, length=64, rows=8), []
    for pruned in (False, True):
        model = encoder(layers=1, sharpness=1.5)
        if pruned:
            getattr(model.encoder.layer[0].attention.self, part).weight.data[8:16] = 0
        found.append({(f.head, f.quantity): f for f in judged(prediction, model, batches).findings})
    for (head, quantity), f in found[1].items():
        if head == 1:
            assert f.verdict in ("", "not applicable")
            assert part == "query" or math.isnan(f.value)
        else:
            assert f.value == pytest.approx(found[0][head, quantity].value, rel=1e-4, abs=1e-4)


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY, length=64, rows=8), decoder(key_heads=2, layers=1)
    one = probed(model, batches[0])
    whole, even, odd = (state_of(mixture, model, b, one.architecture) for b in (batches, batches[::2], batches[1::2]))
    rows, merged = (findings_of(mixture, state, one) for state in (whole, merge(even, odd)))
    assert len(rows) == len(merged) > 50
    for a, b in zip(rows, merged, strict=True):
        np.testing.assert_allclose(a[6:12], b[6:12], rtol=1e-6, atol=1e-9)
