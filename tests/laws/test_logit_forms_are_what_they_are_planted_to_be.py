"""Positive logit forms that follow the tokens are found; every cosine is that of whole matrices.   [theory E12, E13]"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from gradlogz.probing import capture
from gradlogz.probing.batch_pass import BatchPass
from gradlogz.probing.predictions import qk_geometry
from gradlogz.probing.statistics import merge
from support.planted import matrices
from support.planted.updates import negative
from support.pretrained import minilm
from support.probe_models import details_of, findings_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=24)
ALONE = (qk_geometry.POSITIVE, qk_geometry.SYMMETRIC, qk_geometry.SHARE)


def column(findings, quantity, field="value", layer=None):
    found = [getattr(f, field) for f in findings if f.quantity == quantity and layer in (None, f.layer)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("power", "target"), [(0.25, qk_geometry.WITH_C), (-0.25, qk_geometry.WITH_INVERSE)])
def test_forms_that_follow_the_tokens_are_supported(power, target):
    """Powers of the covariance of the tokens, or of its inverse, on the axes that a head reads."""
    found = judged(qk_geometry, matrices.on_token_axes(0, 1.0, power), BATCHES)
    assert found.verdict == "supported"
    assert bool((column(found.findings, target) > column(found.findings, target, "null_high")).all())
    for quantity in ALONE:
        close(column(found.findings, quantity), torch.ones(8, dtype=torch.float64), tolerance=1e-5)
        assert bool((column(found.findings, quantity, "null_high") < 0.9).all())


@pytest.mark.parametrize("build", [matrices.gpt2, matrices.bert])
def test_equal_matrices_are_positive_and_support_nothing(build):
    """W_q = W_k without training: positive semidefinite, along directions that are not those of the tokens."""
    found = [judged(qk_geometry, build(seed, matrices.alike), BATCHES) for seed in range(4)]
    assert {each.verdict for each in found} == {"inconclusive"}
    assert sum(each.supported for each in found) <= 2  # of 32 heads
    for each in found:
        close(column(each.findings, qk_geometry.POSITIVE), torch.ones(8, dtype=torch.float64), tolerance=1e-5)


@pytest.mark.parametrize("heads", [matrices.crossed, negative])
def test_opposed_forms_are_refuted(heads):
    found = judged(qk_geometry, matrices.gpt2(1, heads), BATCHES)
    assert found.verdict == "refuted"
    close(column(found.findings, qk_geometry.POSITIVE), torch.zeros(8, dtype=torch.float64), tolerance=0.1)


def wide(strength, seed=1, width=256):
    return matrices.gpt2(seed, lambda generator, gain: matrices.alike(generator, gain, strength), width=width)


def test_the_sign_decides_and_random_forms_are_unrelated():
    """Cosines of W_q and W_k of -0.1, the smallest one of interest, of 0 and of 0.1."""
    verdicts = {strength: judged(qk_geometry, wide(strength), BATCHES) for strength in (-0.1, 0.0, 0.1)}
    assert {strength: found.verdict for strength, found in verdicts.items()} == {
        -0.1: "refuted", 0.0: "inconclusive", 0.1: "inconclusive"
    }  # fmt: skip
    counts = {strength: details_of(found)["unrelated"].count for strength, found in verdicts.items()}
    assert counts[0.0] == 8
    assert counts[-0.1] == counts[0.1] == 0
    assert set(remarks_of(verdicts[0.0])) == {"unrelated"}


def test_the_positive_cosine_of_a_wide_stream_follows_from_the_cosine_of_its_matrices():
    """(1 + c) / 2 for W_k = c W_q + sqrt(1 - c²) noise: the derivation of the bound."""
    generator = torch.Generator().manual_seed(0)
    U, noise = torch.randn(2, 1, 4096, 4, generator=generator, dtype=torch.float64)
    for c in (-0.5, -0.1, 0.0, 0.1, 0.5, 0.9):
        B = (U @ (c * U + (1 - c**2) ** 0.5 * noise).mT)[0]
        eigenvalues = torch.linalg.eigvalsh((B + B.mT) / 2)
        cosine = eigenvalues.clamp(min=0).norm() / B.norm()
        close(cosine, torch.tensor((1 + c) / 2, dtype=torch.float64), tolerance=0.02)


def test_forms_that_are_more_alike_are_found_more_often():
    supported, cosines = [], []
    for strength in (0.0, 0.5, 0.8, 0.95, 1.0):
        model = matrices.on_token_axes(2, strength, 0.25)
        rows = [f for f in judged(qk_geometry, model, BATCHES).findings if f.quantity == qk_geometry.POSITIVE]
        supported.append(sum(f.verdict == "supported" for f in rows))
        cosines.append(float(np.median([f.value for f in rows])))
    assert cosines == sorted(cosines)
    assert supported == sorted(supported)
    assert (supported[0], supported[-1]) == (0, 8)


def test_random_forms_are_not_supported_and_stay_in_their_bands():
    """200 heads without relation: none is supported or beyond the bounds, each quantity leaves its band as it says."""
    findings = []
    one = probed(matrices.gpt2(0, matrices.free), BATCHES[0])
    state = state_of(qk_geometry, matrices.gpt2(0, matrices.free), BATCHES, one.architecture)
    generator = np.random.default_rng(0)
    for _ in range(25):
        weights = {}
        for layer in one.architecture.attention:
            Wq, Wk, _, _ = (torch.from_numpy(W) for W in matrices.random_heads(generator))
            weights[layer] = one.weights[layer]._replace(query=Wq, key=Wk, norm=None)
        findings += findings_of(qk_geometry, state, replace(one, weights=weights, seed=int(generator.integers(10**6))))
    assert len(column(findings, qk_geometry.POSITIVE)) == 200
    assert not bool((column(findings, qk_geometry.POSITIVE) > qk_geometry.SUPPORTS).any())
    verdicts = [f.verdict for f in qk_geometry.verdict(findings).findings if f.quantity == qk_geometry.POSITIVE]
    assert verdicts.count("refuted") < 200 * (0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5)
    assert set(verdicts) <= {"inconclusive", "refuted"}
    for quantity in (*ALONE, qk_geometry.WITH_I, qk_geometry.WITH_C, qk_geometry.WITH_INVERSE):
        value, low, high = (column(findings, quantity, field) for field in ("value", "null_low", "null_high"))
        outside = float(((value < low) | (value > high)).double().mean())
        assert outside < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5, quantity


def test_common_axes_are_no_relation():
    """Independent W_q and W_k on the few axes along which tokens vary: the null allows for them."""
    found = [judged(qk_geometry, matrices.on_token_axes(seed, 0.0, power), BATCHES)
             for power in (0.25, 0.5, 1.0) for seed in range(8)]  # fmt: skip
    assert {each.verdict for each in found} == {"inconclusive"}
    assert sum(each.refuted for each in found) <= 192 * (0.05 + 3 * (0.05 * 0.95 / 192) ** 0.5)
    assert sum(each.supported for each in found) == 0
    values, rotated = [], []
    for each in found:
        values += [abs(f.value - f.null) for f in each.findings if f.quantity == qk_geometry.POSITIVE]
        rotated += [f.null_high - f.null for f in each.findings if f.quantity == qk_geometry.POSITIVE]
    assert np.mean(np.array(values) < rotated) > 0.9


def test_the_null_keeps_the_axes_of_both_sides_and_does_not_depend_on_the_basis():
    generator = torch.Generator().manual_seed(0)
    U, V = torch.randn(2, 3, 20, 4, generator=generator, dtype=torch.float64)
    M = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    one, other = (qk_geometry._sides(qk_geometry._gram(*each)) for each in ((U, V), (U @ M, V @ M.inverse().mT)))
    a, S, b = torch.linalg.svd(U @ V.mT, full_matrices=False)
    sides = qk_geometry._gram(a[..., :4] * S[:, None, :4], b.mT[..., :4] * S[:, None, :4])
    moments = torch.zeros(3, 4, 4, dtype=torch.float64)
    for turned in (rotations := torch.cat([qk_geometry._rotations(4, generator) for _ in range(200)])):
        gram = qk_geometry._unrelated(one, turned)
        moments += gram[:, :4, :4] / len(rotations)
        close(gram[:, 4:, 4:], sides[:, 4:, 4:], scale=1e3)
        close(qk_geometry._unrelated(other, turned), gram, scale=1e6 * float(gram.abs().max()))
    # On average all columns of P S O are alike; (P S O)(P S O)ᵀ is B Bᵀ for every O.
    expected = S[:, :4].square().mean(-1)[:, None, None] * torch.eye(4, dtype=torch.float64)
    close(moments, expected, scale=expected.max(), tolerance=0.1)
    swapped = torch.eye(4, dtype=torch.float64)[[1, 2, 3, 0]]
    values = torch.stack(qk_geometry._alone(qk_geometry._unrelated(one, swapped)))
    flips = [torch.tensor(signs, dtype=torch.float64) for signs in itertools.product((1.0, -1.0), repeat=4)]
    drawn = torch.stack([
        torch.stack(qk_geometry._alone(qk_geometry._gram(
            a[..., :4] * f * S[:, None, :4] @ swapped, b.mT[..., :4] * f * S[:, None, :4]))) for f in flips
    ])  # fmt: skip
    assert float((drawn - values).abs().amax(1).amin(0).max()) < 1e-8  # one choice of the signs of each head


@pytest.mark.parametrize("rank", [32, 16])
def test_matrices_of_lower_rank_have_values(rank):
    """One head of the width of the stream, of which the norm removes a direction; and a head of half of its rank."""
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=1)
        model = transformers.GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for block in model.transformer.h:
                left, right = (torch.randn(n, m, generator=g) for n, m in ((32, rank), (rank, 32)))
                block.attn.c_attn.weight[:, :64] = (0.1 * left @ right).repeat(1, 2)  # W_q = W_k
        found = judged(qk_geometry, model, token_batches(100, length=32, rows=4, padded=False))
        assert found.verdict != "failed"
        assert found.value == pytest.approx(1.0, abs=1e-6)


def test_the_null_of_a_cosine_is_that_of_rotations():
    generator = torch.Generator().manual_seed(0)
    B, T = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    B, T = B + B.mT + torch.eye(6), (T @ T.mT)[:1]
    Q, R = torch.linalg.qr(torch.randn(20000, 1, 6, 6, generator=generator, dtype=torch.float64))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    draws = qk_geometry._cosine(Q @ B @ Q.mT, T)
    expected = torch.tensor(qk_geometry._turned(*map(qk_geometry._sizes, (B, T)), 6), dtype=torch.float64)
    close(draws.mean(0), expected[:, 0], scale=expected[:, 1], tolerance=0.04)
    close(draws.std(0), expected[:, 1], scale=expected[:, 1], tolerance=0.03)


def test_a_planted_inverse_covariance_is_the_best_target():
    model = matrices.gpt2(3, matrices.free)
    one = probed(model, BATCHES[0])
    state = state_of(qk_geometry, model, BATCHES, one.architecture)
    layer = one.architecture.attention[1]
    weights = one.weights[layer]
    E = qk_geometry._components(state[layer].read, weights, one.computed)
    C = qk_geometry._covariance(state[layer].read.total(), weights, E)
    values, vectors = torch.linalg.eigh(torch.linalg.inv(C))
    r = matrices.SIZE
    whole = (E @ vectors[:, -r:] * values[-r:].sqrt()).expand(matrices.HEADS, -1, -1)
    gain = weights.norm.gain.unsqueeze(-1)
    planted = replace(one, weights={layer: weights._replace(query=whole / gain, key=whole / gain)})
    findings = findings_of(qk_geometry, state, planted)
    best = column(findings, qk_geometry.WITH_INVERSE, layer=layer)
    for quantity in (qk_geometry.WITH_I, qk_geometry.WITH_C):
        assert bool((best > column(findings, quantity, layer=layer) + 0.05).all())
    assert bool((best > column(findings, qk_geometry.WITH_INVERSE, "null_high", layer)).all())


def test_shards_merge_to_one_pass():
    model = matrices.gpt2(4, matrices.free)
    one = probed(model, BATCHES[0])
    states = [state_of(qk_geometry, model, part, one.architecture) for part in (BATCHES, BATCHES[3:], BATCHES[:3])]
    found = [qk_geometry.evaluate(state, one) for state in (states[0], merge(states[1], states[2]))]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64).nan_to_num() for rows in found)
    close(a, b, tolerance=1e-8)


def test_the_values_of_minilm_are_those_of_whole_matrices():
    model, _ = minilm()
    batches = token_batches(30000, rows=4, length=32, batches=2)
    one = probed(model, batches[0])
    layer = "encoder.layer.2.attention.self"
    alone = replace(one, architecture=one.architecture._replace(attention=(layer,)))
    state = state_of(qk_geometry, model, batches, one.architecture)
    rows = findings_of(qk_geometry, state, alone)
    assert all(np.isfinite(f.value) for f in rows)
    own, norm = model.encoder.layer[2].attention.self, model.encoder.layer[1].output.LayerNorm
    gain = norm.weight.detach().double()
    P = torch.from_numpy(matrices.centring(384))
    Q, K = (P @ (gain[:, None] * W.weight.detach().double().mT) for W in (own.query, own.key))
    B = torch.stack([Q[:, i : i + 32] @ K[:, i : i + 32].mT / 32**0.5 for i in range(0, 384, 32)])
    S = (B + B.mT) / 2
    eigenvalues, vectors = torch.linalg.eigh(S)
    nearest = (vectors * eigenvalues.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    cosine = (B * nearest).sum((1, 2)) / (B.norm(dim=(1, 2)) * nearest.norm(dim=(1, 2)))
    close(column(rows, qk_geometry.POSITIVE), cosine, tolerance=1e-5)
    close(column(rows, qk_geometry.SYMMETRIC), S.square().sum((1, 2)) / B.square().sum((1, 2)), tolerance=1e-5)
    share = eigenvalues.clamp(min=0).sum(-1) / eigenvalues.abs().sum(-1)
    close(column(rows, qk_geometry.SHARE), share, tolerance=1e-5)
    z = []
    fisher, n = torch.zeros(12, 32, 32, dtype=torch.float64), 0
    for batch in batches:
        found = capture(model, batch.inputs, architecture=one.architecture)
        seen = batch.inputs["attention_mask"].bool()
        z.append(found.sublayers[layer].input[seen].double())
        event = found.attention[layer]
        chosen = qk_geometry.rows_of(event, BatchPass(batch))
        s = event.query.double() @ event.key.double().mT / 32**0.5
        p = s.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        for b, place in [(row, int(i)) for row in range(4) for i in chosen.places[row][chosen.valid[row]]]:
            for h in range(12):
                keys = event.key[b, h].double()
                fisher[h] += torch.cov(keys.mT, correction=0, aweights=p[b, h, place])
            n += 1
    C = P @ (torch.cov(torch.cat(z).mT, correction=0) / gain / gain[:, None]) @ P
    values, vectors = torch.linalg.eigh(C)
    held = values.flip(0).cumsum(0) / values.sum()
    E = vectors[:, -max(int((held < 0.9).sum()) + 1, 32) :]
    M, T = E.mT @ S @ E, E.mT @ C @ E
    for quantity, target in (
        (qk_geometry.WITH_I, torch.eye(len(T), dtype=torch.float64)),
        (qk_geometry.WITH_C, T),
        (qk_geometry.WITH_INVERSE, torch.linalg.inv(T)),
    ):
        close(column(rows, quantity), (M * target).sum((1, 2)) / (M.norm(dim=(1, 2)) * target.norm()), tolerance=1e-5)
    L = torch.linalg.cholesky(T)  # any root whitens: the cosine with I does not know rotations
    white = L.mT @ M @ L
    trace = white.diagonal(dim1=1, dim2=2).sum(-1)
    close(column(rows, qk_geometry.WHITENED), trace / (white.norm(dim=(1, 2)) * len(T) ** 0.5), tolerance=1e-5)
    for h, value in enumerate(column(rows, qk_geometry.FISHER)):
        V = K[:, 32 * h : 32 * h + 32]
        back = torch.linalg.pinv(V)
        projection, lifted = V @ back, back.mT @ fisher[h] @ back  # on the directions that keys read
        form = projection @ S[h] @ projection
        close(value, (form * lifted).sum() / (form.norm() * lifted.norm()), tolerance=1e-5)
    (tokens,) = {f.tokens for f in rows if f.quantity == qk_geometry.FISHER}
    assert tokens == n
