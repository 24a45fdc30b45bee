"""The tie of value maps with gradients is found in models that have it, and not in others.   [theory E7]"""

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.predictions import tie
from gradlogz.probing.predictions.observables import attention_rows
from gradlogz.probing.predictions.observables.head_factors import Factors, Moments, cosine, factors_of, folded, products
from gradlogz.probing.runs.records import Finding
from gradlogz.probing.statistics import merge
from support.planted import matrices
from support.planted.rows import decoder, encoder
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=3, length=32)


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


def test_a_tied_model_is_supported():
    found = judged(tie, matrices.gpt2(1, matrices.tied), BATCHES)
    assert found.verdict == "supported"
    close(values(found.findings, tie.COSINE), torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    close(values(found.findings, tie.WEIGHTED), torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    assert all(f.verdict == "supported" for f in found.findings if f.quantity == tie.WEIGHTED)
    counts = {d.key: d.count for d in found.details if d.count is not None}
    assert counts == {"unrelated": 0, "above_rotations": 8, "below_rotations": 0}


def test_heads_are_aligned_opposed_or_unrelated():
    """The sign is the finding; intervals within the bound are counted as unrelated."""

    def row(head, value, arm=0.01):
        numbers = (value, value - arm, value + arm, 0.0, -0.02, 0.02)
        return Finding("model", "tie", "h.0", 1, head, tie.WEIGHTED, *numbers, tokens=100)

    def found(*heads):
        judgement = tie.verdict([row(i, *head) for i, head in enumerate(heads)])
        unrelated = next(d.count for d in judgement.details if d.key == "unrelated")
        return judgement.verdict, judgement.supported, judgement.refuted, unrelated

    assert found((0.3,), (0.2,), (-0.2,)) == ("supported", 2, 1, 0)
    assert found((-0.3,), (-0.2,), (0.2,)) == ("refuted", 1, 2, 0)
    assert found((0.01,), (-0.02,), (-0.2,)) == ("inconclusive", 0, 1, 2)
    assert found((0.01, 0.3), (-0.02, 0.3), (-0.2,)) == ("inconclusive", 0, 1, 0)  # too uncertain to be unrelated


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


def test_the_band_is_that_of_random_rotations():
    """Both kinds, drawn: of the updates, and between what a head reads and what it writes."""
    base = probed(matrices.gpt2(6, matrices.tied), BATCHES[0])
    layer = base.architecture.attention[0]
    factors = folded(factors_of(base, layer), base, layer)
    weight = torch.randn(
        matrices.WIDTH, matrices.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    C = weight @ weight.mT
    moments = Moments(
        *(V.mT @ C @ W for V, W in ((factors.value, factors.key), (factors.value,) * 2, (factors.key,) * 2))
    )
    A, B = (weight.mT @ M for M in (factors.value @ factors.output, factors.key @ factors.query.mT))
    generator = torch.Generator().manual_seed(0)

    def rotation(*shape):
        Q, R = torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64))
        return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)

    P = torch.from_numpy(matrices.centring())
    U = torch.linalg.eigh(P).eigenvectors[:, 1:]  # the space that a centring norm sees
    read, S, written = torch.linalg.svd(A)
    read, S, written = (
        read[..., : matrices.SIZE],
        S[..., : matrices.SIZE].diag_embed(),
        written[..., : matrices.SIZE, :],
    )
    sizes = A.norm(dim=(1, 2)) * B.norm(dim=(1, 2))
    draws = {tie._rotated: [], tie._with_rotated_sides: []}
    for _ in range(4000):
        turned = A @ (U @ rotation(matrices.WIDTH - 1, matrices.WIDTH - 1) @ U.mT)
        draws[tie._rotated].append((turned * B).sum((1, 2)) / sizes)
        turned = read @ S @ rotation(matrices.HEADS, matrices.SIZE, matrices.SIZE) @ S @ written
        turned = turned * matrices.SIZE**0.5 / A.norm(dim=(1, 2), keepdim=True)
        draws[tie._with_rotated_sides].append((turned * B).sum((1, 2)) / sizes)
    for deviation, each in draws.items():
        drawn, expected = torch.stack(each), deviation(factors, moments)
        close(drawn.std(0), expected, scale=expected, tolerance=0.04)
        assert float((drawn.mean(0) / drawn.std(0)).abs().max()) * 4000**0.5 < 4


def test_one_axis_is_no_tie():
    """Attended means, updates and gradients that all have one axis: cosines are beyond rotations, and near +1 or -1."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    h, D, d = 6, 256, 16
    value, key, output, query = normal(h, D, d), normal(h, D, d), normal(h, d, D), normal(h, D, d)
    read, written = (torch.nn.functional.normalize(normal(D), dim=0) for _ in range(2))
    output, query = (
        output + 100 * (output @ written)[..., None] * written,
        query + 100 * written[:, None] * (written @ query)[:, None],
    )
    C = torch.eye(D, dtype=torch.float64) + 1e4 * read[:, None] * read
    f = Factors(value, key, output, query, D)
    moments = Moments(value.mT @ C @ key, value.mT @ C @ value, key.mT @ C @ key)
    cosines = cosine(*products(f, moments))
    assert bool((cosines.abs() > 5 * tie._rotated(f, moments)).all())
    assert bool((cosines.abs() < 1.96 * tie._with_rotated_sides(f, moments)).all())


def test_shards_merge_to_one_pass():
    model = matrices.gpt2(7, matrices.free)
    one = probed(model, BATCHES[0])
    whole = state_of(tie, model, BATCHES, one.architecture)
    parts = merge(
        state_of(tie, model, BATCHES[5:], one.architecture), state_of(tie, model, BATCHES[:5], one.architecture)
    )
    found = [values(findings_of(tie, state, one), tie.WEIGHTED) for state in (whole, parts)]
    close(found[0], found[1], tolerance=1e-10)


@pytest.mark.parametrize("build", [lambda: matrices.gpt2(7, matrices.free), encoder, lambda: decoder(key_heads=2)])
def test_the_weight_is_the_second_moment_of_the_attended_means(build, monkeypatch):
    """Dense attention of every query: x̄ = a x, then W_v and W_k, also with rotary embeddings and shared keys."""
    monkeypatch.setattr(attention_rows, "SHARE", 1.0)
    model, batch = build().double(), token_batches(96, rows=3, length=16, batches=1)[0]
    known = probed(model, batch)
    captured = capture(model, batch.inputs, architecture=known.architecture)
    state = state_of(tie, model, [batch], known.architecture)
    real = batch.inputs["attention_mask"].bool()
    for layer in known.architecture.attention:
        attended, weights = captured.attention[layer], known.weights[layer]
        h, n = attended.query.shape[1:3]
        k = attended.key.repeat_interleave(h // attended.key.shape[1], 1)
        s = attended.query @ k.mT * attended.query.shape[-1] ** -0.5
        hidden = ~real[:, None, None] | (torch.ones(n, n).triu(1).bool() if build is not encoder else False)
        means = s.masked_fill(hidden, -torch.inf).softmax(-1) @ captured.sublayers[layer].input.unsqueeze(1)
        x = means.transpose(0, 1)[:, real]  # [h, t, D]
        norm = known.architecture.branch_of(layer).reads
        x = x if norm is None else x - norm.bias  # of a pre-norm layer, which may be moved into the biases of its maps
        found = tie._moments(state[layer].attended.total(), tie._biases(known, layer))
        for moment, V, W in (
            (found.across, weights.value, weights.key),
            (found.value, weights.value, weights.value),
            (found.key, weights.key, weights.key),
        ):
            expected = (x @ V).mT @ (x @ W) / x.shape[1]
            close(moment, expected, scale=float(expected.abs().max()), tolerance=1e-5)


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
    P = torch.from_numpy(matrices.centring(384))
    gain = model.encoder.layer[2].output.LayerNorm.weight.double()
    rows = [f for f in findings if f.layer == "encoder.layer.3.attention.self"]
    for quantity, left in ((tie.COSINE, (gain[:, None] * P) @ (P * gain)),):
        inner, own, gradient = (((X @ P).mT @ left @ (Y @ P)).diagonal(dim1=1, dim2=2).sum(-1)
                                for X, Y in ((A, B), (A, A), (B, B)))  # fmt: skip
        close(values(rows, quantity), (inner / (own * gradient).sqrt()).detach(), tolerance=1e-5)


def test_layers_without_matrices_are_not_judged():
    row = tie.verdict([Finding("m", "tie", "layer", 1, None, tie.WEIGHTED, float("nan"))])
    assert row.verdict == "not applicable"
    assert row.findings[0].verdict == "not applicable"
