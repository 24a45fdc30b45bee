"""The QK matrix as a linear link: its map is that of `linear_link`, and planted links are found.   [theory E57]"""

import math

import numpy as np
import pytest
import torch

from gradlogz import Empirical
from gradlogz.filters import linear_link
from gradlogz.probing.predictions import link, qk_geometry
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.predictions.observables.key_link import divergence, linear_links, products_of, whitened
from gradlogz.probing.predictions.observables.visible_keys import DRAWN, VisibleKeys, visible_keys
from gradlogz.probing.statistics import merge
from support.planted.links import HEADS, SIZE, LinkedQueries
from support.planted.rows import VOCABULARY, decoder, encoder
from support.probe_models import details_of, findings_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close


def some_rows(source, heads=2, rows=90, d=5, documents=9):
    """Rows with drawn vectors, of no model."""
    root = source.standard_normal((heads, d, d))
    draw = source.standard_normal
    query, moved = torch.from_numpy(draw((2, heads, rows, d)))
    seen = torch.from_numpy(draw((heads, rows, DRAWN, d)) @ root[:, None])
    own = torch.from_numpy(draw((heads, rows, d)) @ root)
    document = torch.from_numpy(source.integers(0, documents, rows))
    numbers = torch.ones(3, heads, rows, dtype=torch.float64)
    return VisibleKeys(query, moved, seen, own, *numbers, document, document % 8, torch.zeros(heads, dtype=torch.bool))


def test_the_linear_link_is_that_of_the_measure_of_the_keys():
    """Map, offset, R² and divergence, with and without a group, against `linear_link` of the points themselves."""
    rows = some_rows(np.random.default_rng(0))
    white = whitened(rows)
    versions = torch.stack([rows.group >= 0, rows.group != 3])
    fitted = linear_links(white.query, white.key, versions, white.row)
    for v, kept in enumerate(versions):
        for h in range(2):
            expected = linear_link(Empirical(white.key[h, kept[white.row]]), white.query[h, kept])
            close(fitted.matrix[v, h], expected.matrix, scale=100 * float(expected.matrix.abs().max()))
            close(fitted.offset[v, h], expected.offset, scale=100 * float(expected.matrix.abs().max()))
    measure = link._Layer(white, versions, products_of(white, versions), fitted, rows)
    errors = measure.errors(white.key, fitted)
    for h in range(2):
        expected = linear_link(Empirical(white.key[h]), white.query[h])
        close(errors[link.LINEAR].value[h], expected.r_squared, scale=100.0)
        close(errors[link.OF_LINEAR].value[h], expected.divergence, scale=100.0)


def test_the_cosine_is_a_correlation_of_logits():
    """Over all pairs of a row and a key, of the logits of the query with those of its own key times the link."""
    rows = some_rows(np.random.default_rng(1))
    white = whitened(rows)
    every = torch.ones(1, 90, dtype=torch.bool)
    products, fitted = products_of(white, every), linear_links(white.query, white.key, every, white.row)
    for T, h in ((T, h) for T in (fitted.matrix, torch.linalg.inv(products.K)) for h in range(2)):
        q, o, k = (t[h] - t[h].mean(0) for t in (white.query, white.own_key, white.key))
        one, two = (q @ k.mT).flatten(), (o @ T[0, h] @ k.mT).flatten()
        close(products.cosine(T)[0, h], one @ two / (one.norm() * two.norm()), scale=10.0)


def test_the_rotation_null_is_that_of_rotated_queries():
    rows, generator = some_rows(np.random.default_rng(2), d=6), torch.Generator().manual_seed(0)
    white = whitened(rows)._replace(query=torch.randn(2, 90, 6, generator=generator, dtype=torch.float64))
    white = white._replace(query=white.query + white.own_key)  # some relation to lose
    key = white.key - white.key.mean(1, keepdim=True)
    white = white._replace(key=torch.linalg.solve_triangular(torch.linalg.cholesky(key.mT @ key / key.shape[1]), key.mT,
                                                             upper=False).mT)  # fmt: skip
    every = torch.ones(1, 90, dtype=torch.bool)
    T = linear_links(white.query, white.key, every, white.row).matrix
    turned = torch.linalg.qr(torch.randn(4000, 6, 6, generator=generator, dtype=torch.float64))
    Q = turned.Q * turned.R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    S, P = (products_of(white, every)._asdict()[name][0, 0] for name in "SP")
    q = white.query[0] - white.query[0].mean(0)
    size = (q.square().sum() / 90 * (T[0, 0].mT @ P @ T[0, 0]).diagonal().sum()).sqrt()
    drawn = ((Q.mT @ S) @ T[0, 0]).diagonal(dim1=-2, dim2=-1).sum(-1) / size
    assert float(drawn.std()) == pytest.approx(float(products_of(white, every).rotated(T)[0, 0]), rel=0.05)
    assert abs(float(drawn.mean())) < 4 * float(drawn.std()) / math.sqrt(4000)


def test_divergences_are_relative_entropies_of_attention_weights():
    rows = some_rows(np.random.default_rng(3))
    white = whitened(rows)
    fitted = linear_links(white.query, white.key, torch.ones(1, 90, dtype=torch.bool), white.row)
    p, r = ((t @ white.key.mT).log_softmax(-1) for t in (white.query, white.own_key))
    close(divergence(fitted, white.query, white.key, white.own_key), (p.exp() * (p - r)).sum(-1), scale=100.0)


@pytest.mark.parametrize(("strength", "compatible"), [(1.0, HEADS), (0.85, HEADS), (0.4, 0), (0.0, 0), (-0.4, 0),
                                                      (-1.0, 0)])  # fmt: skip
def test_planted_links_are_found(strength, compatible):
    """Opposed heads refute the claim; heads that the link explains are compatible with it, and do not support it."""
    found = judged(link, LinkedQueries(strength), token_batches(4000, length=128, padded=False))
    assert found.verdict == ("refuted" if strength < 0 else "inconclusive"), found
    assert found.supported == 0
    assert details_of(found)["compatible"].count == compatible
    assert found.value == pytest.approx(strength, abs=0.1)
    above, below = (details_of(found)[f"{side}_rotations"].count for side in ("above", "below"))
    assert (above, below) == (HEADS * (strength > 0), HEADS * (strength < 0))
    expected = {0.4: {"aligned"}, -0.4: {"opposed"}, -1.0: {"opposed"}}
    assert set(remarks_of(found)) - ({"unrelated"} if strength == 0 else set()) == expected.get(strength, set())


def test_equal_matrices_support_nothing_without_training():
    """W_q = W_k is a link of some positive matrix, and positive: compatible with the claims, and no evidence."""
    batches = token_batches(VOCABULARY, length=64, rows=6)
    equal, free = encoder(sharpness=1.0, width=64), encoder(sharpness=1.0, width=64)
    for layer in equal.encoder.layer:
        layer.attention.self.key.load_state_dict(layer.attention.self.query.state_dict())
    for prediction in (link, qk_geometry):
        for model in (equal, free):
            found = judged(prediction, model, batches)
            assert found.verdict == "inconclusive", found
            assert found.supported == 0 == found.refuted, found
    above, other = (details_of(judged(link, model, batches)) for model in (equal, free))
    assert above["above_rotations"].count == above["above_rotations"].total
    assert other["above_rotations"].count <= 1


def test_queries_of_gaussian_keys_have_linear_links():
    """Gaussian keys, gentle logits: the link is linear, T = Sigma⁻¹, and both cosines are the same."""
    found = judged(link, LinkedQueries(1.0, logits=0.5), token_batches(4000, length=128, padded=False))
    details = details_of(found)
    assert details[link.LINEAR].value > 0.95
    assert details[link.GAUSSIAN].value == pytest.approx(found.value, abs=0.02)
    assert details[link.OF_QK].value < 0.1 * details[link.OF_QK].null


def test_random_matrices_are_not_links():
    found = judged(link, encoder(sharpness=1.5), token_batches(VOCABULARY, length=64, rows=6))
    assert found.supported == 0 == found.refuted, found
    assert details_of(found)["above_rotations"].count <= 1


@pytest.mark.parametrize("heads", [4, 2])
def test_rotary_rows_are_in_the_frame_of_the_query(heads, monkeypatch):
    """Queries and own keys are those of unrotated tokens, and logits of seen keys are those of the layer."""
    monkeypatch.setattr(chosen_rows, "SHARE", 1 / 4)
    model, batches = decoder(sharpness=2.0, key_heads=heads, width=64).double(), token_batches(VOCABULARY, batches=2)
    one = probed(model, batches[0])
    name = one.architecture.attention[0]
    layer = one.weights[name]
    rows = visible_keys(state_of(link, model, batches, one.architecture)[name].rows, layer)
    assert rows is not None
    turned = visible_keys(state_of(link, model, batches, one.architecture)[name].rows, layer._replace(rotary=False))
    logits = [
        torch.einsum("htd,htsd->hts", r.query, r.visible.repeat_interleave(4 // heads, 0)) for r in (rows, turned)
    ]
    close(logits[0], logits[1], scale=1e6 * float(logits[1].abs().max()))  # angles are known to 1e-7
    embedded = model.model.embed_tokens.weight.detach()
    tokens = embedded / (embedded.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    candidates = tokens @ layer.query[0] / math.sqrt(16)
    nearest = torch.cdist(rows.query[0], candidates).min(-1).values
    assert float(nearest.max()) < 1e-4 * float(candidates.norm(dim=-1).mean())
    assert float(torch.cdist(turned.query[0], candidates).min(-1).values.max()) > 0.1


def test_shards_add_to_one_pass():
    batches, model = token_batches(4000, length=64, padded=False), LinkedQueries(0.6)
    one = probed(model, batches[0])
    whole, even, odd = (state_of(link, model, b, one.architecture) for b in (batches, batches[::2], batches[1::2]))
    rows, merged = (findings_of(link, state, one) for state in (whole, merge(even, odd)))
    assert len(rows) == len(merged) == 5 * HEADS
    for a, b in zip(rows, merged, strict=True):
        np.testing.assert_allclose(a[6:12], b[6:12], rtol=1e-6, atol=1e-9)


def test_few_rows_are_not_judged():
    found = judged(link, LinkedQueries(1.0), token_batches(4000, length=32, rows=1, padded=False))
    assert found.verdict == "not applicable"
    assert SIZE > 4
