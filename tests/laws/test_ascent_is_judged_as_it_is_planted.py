"""The gain over the best step: by its definition, and the verdict on models built to climb, to descend, or neither."""

import numpy as np
import pytest
import torch

import gradlogz
from gradlogz.probing.predictions import ascent
from gradlogz.probing.statistics import merge
from support.planted.matrices import VOCABULARY, gpt2, random_heads, tied
from support.planted.rows import decoder, encoder
from support.probe_models import judged, probed, state_of, token_batches
from support.scales import close


@pytest.fixture(autouse=True)
def all_rows(monkeypatch):
    monkeypatch.setattr(ascent, "PART", 1)


def climbing(generator, gain):
    return tied(generator, gain)


def descending(generator, gain):
    Wq, Wk, Wv, Wo = tied(generator, gain)
    return [Wq, Wk, Wv, -Wo]


def careless(generator, gain):
    return random_heads(generator)


@pytest.mark.parametrize(("heads", "expected"), [(climbing, "supported"), (descending, "refuted")])
def test_planted_models_are_judged_as_they_are(heads, expected):
    batches = token_batches(VOCABULARY, rows=1)
    found = judged(ascent, gpt2(0, heads), batches)
    assert found.verdict == expected, found
    gains = [f for f in found.findings if f.quantity == "gain"]
    assert {f.verdict for f in gains} == {expected}
    assert len(gains) == 2


def test_a_small_tied_step_gains_nearly_all():
    """Each head climbs its own log normaliser; the gradient of their sum weighs them otherwise, at a little cost."""

    def small(generator, gain):
        Wq, Wk, Wv, Wo = tied(generator, gain)
        return [Wq, Wk, Wv, 1e-2 * Wo]

    found = judged(ascent, gpt2(0, small, np.ones(32), layers=1), token_batches(VOCABULARY, rows=1))
    (gain,) = [f for f in found.findings if f.quantity == "gain"]
    assert 0.8 < gain.value <= 1.01


@pytest.mark.parametrize("layers", [40, pytest.param(200, marks=pytest.mark.long)])
def test_random_weights_seldom_support(layers):
    """Of layers of random weights at most 5 % are supported, within binomial error."""
    batches = token_batches(VOCABULARY, rows=1, padded=False)
    verdicts = []
    for seed in range(layers // 20):
        found = judged(ascent, gpt2(seed, careless, layers=20), batches)
        verdicts += [f.verdict for f in found.findings if f.quantity == "gain"]
    assert len(verdicts) == layers
    assert verdicts.count("supported") <= 0.05 * layers + 3 * (0.05 * 0.95 * layers) ** 0.5


def test_the_gain_rises_with_the_strength_of_the_tie():
    batches = token_batches(VOCABULARY, rows=1)
    gains = []
    for strength in (0.2, 0.5, 1.0):
        model = gpt2(3, lambda g, gain, s=strength: tied(g, gain, s), layers=1)
        found = judged(ascent, model, batches)
        gains.append(next(f.value for f in found.findings if f.quantity == "gain"))
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.2


@pytest.mark.parametrize("build", [encoder, decoder], ids=["post-norm", "rotary pre-norm"])
def test_the_changes_are_those_of_the_definition(build):
    """G by dense attention in float64: the queries from the matrices, rotated as the model does."""
    model = build(layers=2).double()
    batch = token_batches(96, rows=1, batches=1, padded=False)[0]
    captured = gradlogz.capture(model, batch.inputs)
    state = state_of(ascent, model, [batch], captured.architecture)
    for layer, sums in state.items():
        attended, passed = captured.attention[layer], captured.sublayers[layer]
        row = 0
        k = attended.key[row].repeat_interleave(attended.query.shape[1] // attended.key.shape[1], 0)
        scale = attended.query.shape[-1] ** -0.5
        n = k.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool)
        mask = mask.tril() if build is decoder else mask
        module = model.get_submodule(layer)

        def G(x, module=module, k=k, mask=mask, scale=scale, build=build, n=n, layer=layer):
            if build is decoder:
                block = model.get_submodule(layer.rpartition(".")[0])
                z = block.input_layernorm(x)
                q = module.q_proj(z).unflatten(-1, (4, 8)).transpose(0, 1)
                cos, sin = model.model.rotary_emb(x, torch.arange(n)[None])
                half = torch.cat((-q[..., 4:], q[..., :4]), -1)
                q = q * cos + half * sin
            else:
                q = module.query(x).unflatten(-1, (4, 8)).transpose(0, 1)
            logits = (scale * q @ k.mT).masked_fill(~mask, -torch.inf)
            return logits.logsumexp(-1).sum(0) / scale

        x, D = passed.stream[row], passed.update[row]
        moved = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(G(moved).sum(), moved)
        best = g * D.norm(dim=-1, keepdim=True) / g.norm(dim=-1, keepdim=True)
        with torch.no_grad():
            other = D.roll(-(n // 2), 0)
            expected = [n] + [float((G(x + step) - G(x)).sum()) for step in (best, D, other, -D)]
        found = sums.totals[0, :5]
        rounding = 1e5 if build is decoder else 1e2  # the rotations of the decoder are in float32
        size = rounding * float(G(x).abs().sum().detach())
        close(found, torch.tensor(expected, dtype=torch.float64), scale=size)


def test_shards_merge_to_the_whole():
    batches = token_batches(VOCABULARY, rows=4, batches=4)
    model = gpt2(0, climbing)
    layout = probed(model, batches[0]).architecture
    whole = state_of(ascent, model, batches, layout)
    parts = merge(state_of(ascent, model, batches[2:], layout), state_of(ascent, model, batches[:2], layout))
    for layer, sums in whole.items():
        close(parts[layer].totals, sums.totals, scale=1e2 * float(sums.totals.abs().max()))


def test_layers_that_compute_their_own_logits_are_left_out():
    from support.architectures import ARCHITECTURES

    model = next(a for a in ARCHITECTURES if a.name == "bloom").build()
    found = judged(ascent, model, token_batches(64, rows=2, batches=2))
    assert (found.verdict, found.findings) == ("not applicable", [])
