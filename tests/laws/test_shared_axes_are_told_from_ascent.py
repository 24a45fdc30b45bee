"""Rotations between what a head reads and what it writes: their band, and models whose weights share an axis."""

import numpy as np
import pytest
import torch

import gradlogz
from gradlogz.probing.predictions import ascent, expansion, tie
from gradlogz.probing.predictions.observables import moved_tokens, rotated_sides
from support.planted import matrices
from support.planted.rows import encoder
from support.probe_models import judged, probed, state_of, token_batches

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=32)


@pytest.fixture(autouse=True)
def _every_token(monkeypatch):
    monkeypatch.setattr(moved_tokens, "PART", 1)


def one_axis(generator, gain, strength=30.0):
    """Independent heads whose updates and gradients all have nearly the same axis of the stream."""
    Wq, Wk, Wv, Wo = matrices.free(generator, gain)
    axis = np.tile([1.0, -1.0], matrices.WIDTH // 2) / np.sqrt(matrices.WIDTH)
    return [
        Wq + strength * np.einsum("d,hs->hds", axis, np.einsum("d,hds->hs", axis, Wq)),
        Wk,
        Wv,
        Wo + strength * np.einsum("hs,d->hsd", np.einsum("d,hsd->hs", axis, Wo), axis),
    ]


def beyond(claim, model):
    """Number of layers or heads beyond the band of the null, without a bound."""
    found = judged(claim, model, BATCHES)
    rows = [f for f in found.findings if f.quantity == found.quantity]
    return sum(f.value < f.null_low or f.value > f.null_high for f in rows)


def test_the_band_is_that_of_rotated_heads():
    """Excesses of an encoder whose heads write by A = C^-1/2 P S O S Qᵀ √d / |S| in place of W_o, drawn."""
    model = encoder(layers=1).double()
    batch = token_batches(96, rows=1, batches=1, padded=False)[0]
    captured = gradlogz.capture(model, batch.inputs)
    known = probed(model, batch)
    ((layer, state),) = state_of(ascent, model, [batch], captured.architecture).items()
    attended, passed = captured.attention[layer], captured.sublayers[layer]
    x, D, z = passed.stream[0], passed.update[0], attended.attention.output[0]  # [n, D], [n, D], [h, n, v]
    n, k = len(x), attended.key[0]
    query = model.get_submodule(layer).query

    def centred(t):
        return t - t.mean(-1, keepdim=True)

    def along(t):
        unit = torch.nn.functional.normalize(centred(x), dim=-1)
        return centred(t) - (centred(t) * unit).sum(-1, keepdim=True) * unit

    moved = x.clone().requires_grad_()
    q = query(moved).unflatten(-1, (4, 8)).transpose(0, 1)
    G = (8**-0.5 * q @ k.mT).logsumexp(-1).sum() * 8**0.5
    g = along(torch.autograd.grad(G, moved)[0])
    elsewhere = D.roll(-(n // 2), 0)
    ratio = along(D).norm(dim=-1) / along(elsewhere).norm(dim=-1)
    z = z - ratio.unsqueeze(-1) * z.roll(-(n // 2), 1)
    dense = model.get_submodule(layer.rpartition(".")[0]).output.dense
    W = centred(dense.weight.detach().T.reshape(4, 8, 32))  # [h, v, D]
    values, vectors = torch.linalg.eigh(z.mT @ z)
    root, inverse = (vectors @ values.pow(power).diag_embed() @ vectors.mT for power in (0.5, -0.5))
    P, S, Q = torch.linalg.svd(root @ W, full_matrices=False)
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(4000):
        O, R = torch.linalg.qr(torch.randn(4, 8, 8, generator=generator, dtype=torch.float64))
        O = O * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        A = inverse @ P @ S.diag_embed() @ O @ S.diag_embed() @ Q * (8**0.5 / S.norm(dim=-1))[:, None, None]
        draws.append(((z @ A).sum(0) * g).sum())
    draws = torch.stack(draws)
    deviation = rotated_sides.deviation(state.products, known, layer)
    assert deviation == pytest.approx(float(draws.std()), rel=0.05)
    assert abs(float(draws.mean())) < 4 * float(draws.std()) / 4000**0.5


@pytest.mark.parametrize("claim", [ascent, expansion, tie])
def test_layers_that_add_nothing_are_not_judged(claim):
    model = matrices.gpt2(0, matrices.free)
    with torch.no_grad():
        for block in model.transformer.h:
            for values in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                values[..., 2 * matrices.WIDTH :] = 0
    assert judged(claim, model, BATCHES).verdict == "not applicable"


@pytest.mark.parametrize("claim", [ascent, expansion, tie])
def test_one_axis_that_weights_share_is_no_ascent(claim, monkeypatch):
    """Independent heads with one axis are beyond rotations of the updates, and not beyond those that keep the axis."""
    models = [matrices.gpt2(seed, one_axis, gain=np.ones(matrices.WIDTH)) for seed in range(8)]
    number = len(models) * matrices.LAYERS * (matrices.HEADS if claim is tie else 1)
    assert sum(beyond(claim, model) for model in models) <= 0.05 * number + 3 * (0.05 * 0.95 * number) ** 0.5
    monkeypatch.setattr(rotated_sides, "widened", lambda turned, *_: turned)  # the null without these rotations
    monkeypatch.setattr(tie, "_with_rotated_sides", lambda f, moments: tie._rotated(f, moments))
    assert sum(beyond(claim, model) for model in models) > number / 2
