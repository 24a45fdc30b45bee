"""The tie of value maps with gradients is found in models that have it, and not in others.   [theory E7]"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.inside.head_weights import HeadWeights
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import tie
from gradlogz.probing.runs.records import Finding
from gradlogz.probing.statistics import comoments_of, merge
from support.planted import matrices
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=3, length=16)


def values(findings, quantity):
    return torch.tensor([f.value for f in findings if f.quantity == quantity], dtype=torch.float64)


def test_a_planted_tie_is_the_gradient():
    """The convention, from autograd: along the sphere of the norm, the update is the gradient times a number."""
    model = matrices.gpt2(0, matrices.tied).double()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias.zero_()
            block.ln_1.bias.zero_()
            # One step for all heads: the gradient of the sum of their log normalisers.
            Wq = block.attn.c_attn.weight[:, : matrices.WIDTH]
            block.attn.c_proj.weight.copy_(Wq.T * block.ln_1.weight @ torch.as_tensor(matrices.centring()))
    name = "transformer.h.1.attn"
    inputs = {"input_ids": BATCHES[0].inputs["input_ids"]}
    found = capture(model, inputs)
    passed, attended = found.sublayers[name], found.attention[name]
    block = model.transformer.h[1]
    x = passed.stream.clone().requires_grad_()
    q = block.attn.c_attn(block.ln_1(x))[..., : matrices.WIDTH].unflatten(-1, (matrices.HEADS, -1)).transpose(1, 2)
    beta = matrices.SIZE**-0.5
    s = beta * q @ attended.key.mT
    n = s.shape[-1]
    s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    (gradient,) = torch.autograd.grad((s.logsumexp(-1) / beta).sum(), x)
    y = x.detach() - x.detach().mean(-1, keepdim=True)
    y = y / y.norm(dim=-1, keepdim=True)
    update = passed.update - block.attn.c_proj.bias
    along = update - (update * y).sum(-1, keepdim=True) * y
    close(torch.cosine_similarity(along, gradient, -1), torch.ones(gradient.shape[:2], dtype=torch.float64), 1e3)


@pytest.mark.parametrize("build", [matrices.gpt2, matrices.bert])
def test_a_tied_model_is_supported(build):
    found = judged(tie, build(1, matrices.tied), BATCHES, baseline=build(2, matrices.free))
    assert found.verdict == "supported"
    close(values(found.findings, tie.COSINE), torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    close(values(found.findings, tie.WEIGHTED), torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    assert all(f.verdict == "supported" for f in found.findings if f.quantity == tie.WEIGHTED)
    assert [(d.key, d.count, d.total) for d in found.details] == [("above_rotations", 8, 8), ("below_rotations", 0, 8)]


def transposed(generator, gain):
    """W_v W_o = W_q W_kᵀ: right but for the transposition."""
    Wq, Wk, _, _ = matrices.random_heads(generator)
    return [Wq, Wk, Wq, Wk.transpose(0, 2, 1) * gain]


def opposed(generator, gain):
    Wq, Wk, Wv, Wo = matrices.tied(generator, gain)
    return [Wq, Wk, Wv, -Wo]


@pytest.mark.parametrize("heads", [matrices.free, transposed, opposed])
def test_a_model_without_the_tie_is_refuted(heads):
    found = judged(tie, matrices.gpt2(3, heads), BATCHES, baseline=matrices.gpt2(4, matrices.free))
    assert found.verdict == "refuted"
    assert found.value < 0.5


def test_stronger_ties_are_found_more_often():
    shares, cosines = [], []
    for strength in (0.0, 0.3, 0.55, 0.8, 1.0):
        model = matrices.gpt2(5, lambda generator, gain, s=strength: matrices.tied(generator, gain, s))
        found = judged(tie, model, BATCHES)
        rows = [f for f in found.findings if f.quantity == tie.WEIGHTED]
        shares.append(sum(f.verdict == "supported" for f in rows) / len(rows))
        cosines.append(float(values(rows, tie.WEIGHTED).median()))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert cosines == sorted(cosines)


def random_state(generator, layers, base):
    """Weights of random heads in place of a model's, and tokens of a random covariance in every group."""
    weights, state = {}, {}
    for layer in layers:
        Wq, Wk, Wv, Wo = (torch.from_numpy(W) for W in matrices.random_heads(generator))
        zero = torch.zeros(matrices.HEADS, matrices.SIZE, dtype=torch.float64)
        weights[layer] = HeadWeights(Wq, zero, Wk, zero, Wv, zero, Wo, None, False, False)
        shape = generator.normal(size=(matrices.WIDTH, matrices.WIDTH))
        for group in range(8):
            x = torch.from_numpy(generator.normal(size=(40, matrices.WIDTH)) @ shape)
            state = merge(state, {layer: tie.LayerState(comoments_of(x, group=group))})
    return Probed("null", base.architecture, weights, 0), state


def test_random_models_are_not_supported_and_stay_in_the_band():
    base = probed(matrices.gpt2(0, matrices.free), BATCHES[0])
    generator = np.random.default_rng(0)
    supported = outside = heads = 0
    for _ in range(200):
        model, state = random_state(generator, base.architecture.attention[:1], base)
        findings = findings_of(
            tie, state, replace(model, architecture=base.architecture._replace(attention=tuple(model.weights)))
        )
        supported += any(f.quantity == tie.WEIGHTED and f.low > tie.BOUND for f in findings)  # before the correction
        plain = [f for f in findings if f.quantity == tie.COSINE]
        outside += sum(not f.null_low <= f.value <= f.null_high for f in plain)
        heads += len(plain)
    assert supported <= 16  # 5 % of 200, and three deviations of chance
    assert heads == 800
    assert abs(outside / heads - 0.05) < 0.025  # three deviations of chance


def test_the_band_is_that_of_random_rotations():
    base = probed(matrices.gpt2(6, matrices.tied), BATCHES[0])
    layer = base.architecture.attention[0]
    factors = tie._folded(tie._factors(base, layer), base, layer)
    A, B = factors.value @ factors.output, factors.key @ factors.query.mT
    generator = torch.Generator().manual_seed(0)
    P = torch.from_numpy(matrices.centring())
    U = torch.linalg.eigh(P).eigenvectors[:, 1:]  # the space that a centring norm sees
    draws = []
    for _ in range(4000):
        gaussian = torch.randn(matrices.WIDTH - 1, matrices.WIDTH - 1, generator=generator, dtype=torch.float64)
        Q, R = torch.linalg.qr(gaussian)
        turned = A @ (U @ (Q * R.diagonal().sign()) @ U.mT)
        draws.append((turned * B).sum((1, 2)) / (A.norm(dim=(1, 2)) * B.norm(dim=(1, 2))))
    draws = torch.stack(draws)
    close(draws.std(0), tie._rotated(factors), scale=tie._rotated(factors), tolerance=0.04)
    assert float((draws.mean(0) / draws.std(0)).abs().max()) * 4000**0.5 < 4


def test_shards_merge_to_one_pass():
    model = matrices.gpt2(7, matrices.free)
    one = probed(model, BATCHES[0])
    whole = state_of(tie, model, BATCHES, one.architecture)
    parts = merge(
        state_of(tie, model, BATCHES[5:], one.architecture), state_of(tie, model, BATCHES[:5], one.architecture)
    )
    found = [values(findings_of(tie, state, one), tie.WEIGHTED) for state in (whole, parts)]
    close(found[0], found[1], tolerance=1e-10)


def test_the_cosines_of_minilm_are_those_of_whole_matrices():
    model, given = minilm()
    inputs = {name: given[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    batches = [b._replace(inputs=inputs, keys=torch.arange(3)) for b in token_batches(100, rows=3, batches=2)]
    one = probed(model, batches[0])
    findings = findings_of(tie, state_of(tie, model, batches, one.architecture), one)
    assert all(np.isfinite(f.value) for f in findings)
    own = model.encoder.layer[3].attention
    W = {name: getattr(own.self, name).weight.double().mT.unflatten(1, (12, 32)) for name in ("query", "key", "value")}
    A = W["value"].transpose(0, 1) @ own.output.dense.weight.double().mT.unflatten(0, (12, 32))
    B = W["key"].transpose(0, 1) @ W["query"].permute(1, 2, 0)
    z = capture(model, inputs).sublayers["encoder.layer.3.attention.self"].input[inputs["attention_mask"].bool()]
    C = torch.cov(z.double().mT, correction=0)
    P = torch.from_numpy(matrices.centring(384))
    gain = model.encoder.layer[2].output.LayerNorm.weight.double()
    rows = [f for f in findings if f.layer == "encoder.layer.3.attention.self"]
    for quantity, left in ((tie.WEIGHTED, C), (tie.COSINE, (gain[:, None] * P) @ (P * gain))):
        inner, own, gradient = (((X @ P).mT @ left @ (Y @ P)).diagonal(dim1=1, dim2=2).sum(-1)
                                for X, Y in ((A, B), (A, A), (B, B)))  # fmt: skip
        close(values(rows, quantity), (inner / (own * gradient).sqrt()).detach(), tolerance=1e-5)


def test_layers_without_matrices_are_not_judged():
    row = tie.verdict([Finding("m", "tie", "layer", 1, None, tie.WEIGHTED, float("nan"))])
    assert row.verdict == "not applicable"
    assert row.findings[0].verdict == "not applicable"
