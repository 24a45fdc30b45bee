"""The gain over the steepest step: by its definition, and along the sphere of the norm that follows.   [theory E7]"""

import numpy as np
import pytest
import torch

import gradlogz
from gradlogz.probing.inside.architecture import Norm
from gradlogz.probing.predictions import ascent
from gradlogz.probing.predictions.observables import moved_tokens
from gradlogz.probing.statistics import merge
from support.planted.matrices import VOCABULARY, gpt2, tied
from support.planted.rows import decoder, encoder
from support.probe_models import judged, probed, state_of, token_batches
from support.scales import close


@pytest.fixture(autouse=True)
def all_rows(monkeypatch):
    monkeypatch.setattr(moved_tokens, "PART", 1)


def climbing(generator, gain):
    return tied(generator, gain)


def test_a_small_tied_step_gains_nearly_all():
    """Each head climbs its own log normaliser; the gradient of their sum weighs them otherwise, at a little cost."""

    def small(generator, gain):
        Wq, Wk, Wv, Wo = tied(generator, gain)
        return [Wq, Wk, Wv, 1e-2 * Wo]

    found = judged(ascent, gpt2(0, small, np.ones(32), layers=1), token_batches(VOCABULARY, rows=1))
    (gain,) = [f for f in found.findings if f.quantity == "gain"]
    assert 0.8 < gain.value <= 1.01


def test_the_gain_rises_with_the_strength_of_the_tie():
    batches = token_batches(VOCABULARY, rows=1)
    gains = []
    for strength in (0.2, 0.5, 1.0):
        model = gpt2(3, lambda g, gain, s=strength: tied(g, gain, s), layers=1)
        found = judged(ascent, model, batches)
        gains.append(next(f.value for f in found.findings if f.quantity == ascent.EXCESS))
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.2


@pytest.mark.parametrize("build", [encoder, decoder], ids=["post-norm", "rotary pre-norm"])
def test_the_changes_are_those_of_the_definition(build):
    """G by dense attention in float64: the queries from the matrices, rotated as the model does."""
    model = build(layers=2).double()
    batch = token_batches(96, rows=1, batches=1, padded=False)[0]
    captured = gradlogz.capture(model, batch.inputs)
    state = state_of(ascent, model, [batch], captured.architecture)
    for layer, (sums, _) in state.items():
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
        centre = build is encoder  # LayerNorm subtracts the mean, RMSNorm does not

        def centred(t, centre=centre):
            return t - t.mean(-1, keepdim=True) if centre else t

        def along(t, x=x):
            n = torch.nn.functional.normalize(centred(x), dim=-1)
            return centred(t) - (centred(t) * n).sum(-1, keepdim=True) * n

        def rise(step, x=x, G=G):
            moved = [torch.nn.functional.normalize(centred(x + sign * step), dim=-1) for sign in (1, -1)]
            ends = [m * centred(x).norm(dim=-1, keepdim=True) + x - centred(x) for m in moved]
            return float((G(ends[0]) - G(ends[1])).sum())

        moved = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(G(moved).sum(), moved)
        length = D.norm(dim=-1, keepdim=True)
        best = along(g) * length / along(g).norm(dim=-1, keepdim=True)
        with torch.no_grad():
            other = along(D.roll(-(n // 2), 0))
            other = other * along(D).norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True)
            parts = [float((G(x + step) - G(x)).sum()) for step in (D, D - along(D))]
            expected = [n, *(rise(step) for step in (best, along(D), other)), *parts]
        found = sums.totals[0, 0, [0, 1, 2, 3, 5, 6]]
        rounding = 1e5 if build is decoder else 1e2  # the rotations of the decoder are in float32
        size = rounding * float(G(x).abs().sum().detach())
        close(found, torch.tensor(expected, dtype=torch.float64), scale=size)
        lengths = float((along(g).norm(dim=-1) * length.squeeze(-1)).sum())
        close(sums.totals[0, 0, 7], torch.tensor(lengths, dtype=torch.float64), scale=1e5 * lengths)


def test_a_step_along_the_token_has_no_tangential_part_and_moves_nothing():
    generator = torch.Generator().manual_seed(0)
    x, step = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    for centres in (True, False):
        norm = Norm("norm", 1, centres, torch.ones(8), torch.zeros(8))
        undone = 0.7 * x + (3.0 if centres else 0.0)
        close(moved_tokens.tangential(x, undone, norm), torch.zeros_like(x), scale=10.0)
        close(moved_tokens.on_sphere(x, undone, norm), x, scale=10.0)
        projected = moved_tokens.on_sphere(x, step, norm)
        radial = step - moved_tokens.tangential(x, step, norm)
        n = x - x.mean(-1, keepdim=True) if centres else x
        grown = 1 + (radial * n).sum(-1, keepdim=True) / n.square().sum(-1, keepdim=True)
        close(
            moved_tokens.on_sphere(x, (step - radial) / grown, norm) - (x - n),
            grown.sign() * (projected - (x - n)),
            100.0,
        )


def test_first_tokens_and_massive_activations_are_left_out_of_the_cleaned_excess():
    """The fourth position of every sequence has a coordinate of 1e4."""
    model = gpt2(0, climbing)
    with torch.no_grad():
        model.transformer.wpe.weight[3, 0] = 1e4
    batches = token_batches(VOCABULARY, rows=2)
    state = state_of(ascent, model, batches, probed(model, batches[0]).architecture)
    for sums, _ in state.values():
        every, cleaned = sums.totals[0, :, 0].tolist()
        assert every - cleaned == len(batches) * 2 * 2  # two tokens of each of two sequences


def test_shards_merge_to_the_whole():
    batches = token_batches(VOCABULARY, rows=4, batches=4)
    model = gpt2(0, climbing)
    layout = probed(model, batches[0]).architecture
    whole = state_of(ascent, model, batches, layout)
    parts = merge(state_of(ascent, model, batches[2:], layout), state_of(ascent, model, batches[:2], layout))
    for layer, statistics in whole.items():
        for part, sums in zip(parts[layer], statistics, strict=True):
            close(part.totals, sums.totals, scale=1e2 * float(sums.totals.abs().max()))


def test_layers_that_compute_their_own_logits_are_left_out():
    from support.architectures import ARCHITECTURES

    model = next(a for a in ARCHITECTURES if a.name == "bloom").build()
    found = judged(ascent, model, token_batches(64, rows=2, batches=2))
    assert (found.verdict, found.findings) == ("not applicable", [])
