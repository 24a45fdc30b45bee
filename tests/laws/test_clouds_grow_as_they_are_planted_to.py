"""The divergence of attention maps by its definition, and traces and volumes of clouds.   [theory 5.1, E15]"""

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.predictions import expansion
from gradlogz.probing.predictions.observables import moved_tokens
from gradlogz.probing.statistics import merge
from support.planted import matrices
from support.planted.rows import decoder, encoder
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=32)


@pytest.fixture(autouse=True)
def _every_token(monkeypatch):
    monkeypatch.setattr(expansion, "PART", 1)
    monkeypatch.setattr(moved_tokens, "PART", 1)


def planted(step, seed=0):
    return matrices.gpt2(seed, lambda generator, gain: matrices.spreading(generator, gain, step))


def column(findings, quantity, field="value", layer=None):
    found = [getattr(f, field) for f in findings if f.quantity == quantity and layer in (None, f.layer)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("build", [encoder, decoder], ids=["post-norm", "rotary pre-norm"])
def test_the_divergence_is_that_of_the_jacobian(build):
    """du/dx at fixed keys and values by autograd, one token after the other, in the directions of the probe."""
    model = build(layers=2).double().requires_grad_(False)
    batch = token_batches(96, rows=1, length=12, batches=1, padded=False)[0]
    known = probed(model, batch)
    captured = capture(model, batch.inputs, architecture=known.architecture)
    state = state_of(expansion, model, [batch], known.architecture)
    bank = expansion._bank(32, torch.device("cpu")).double()
    n = 12
    for layer in known.architecture.attention:
        attended, passed = captured.attention[layer], captured.sublayers[layer]
        module, k, v = model.get_submodule(layer), attended.key[0], attended.value[0]

        def update(x, i, layer=layer, module=module, k=k, v=v):
            """The update of token i of a sequence if it were x, everyone else's keys and values as they are."""
            if build is decoder:
                z = model.get_submodule(layer.rpartition(".")[0]).input_layernorm(x)
                q = module.q_proj(z).reshape(4, 8)
                cos, sin = model.model.rotary_emb(x[None, None], torch.tensor([[i]]))
                q = q * cos[0, 0] + torch.cat((-q[:, 4:], q[:, :4]), -1) * sin[0, 0]
                k, v, out = k[:, : i + 1], v[:, : i + 1], module.o_proj
            else:
                q = module.query(x).reshape(4, 8)
                out = model.get_submodule(layer.rpartition(".")[0]).output.dense
            a = torch.einsum("hd,hnd->hn", q, k).div(8**0.5).softmax(-1)
            return out(torch.einsum("hn,hnd->hd", a, v).flatten())

        rates, lengths = 0.0, 0.0
        for i in range(n):
            x = passed.stream[0, i]
            c = x - x.mean() if build is encoder else x
            normal = c / c.norm()
            for p in range(expansion.PROBES):
                w = bank[(expansion.PROBES * i + p) % expansion.BANK]
                w = w - w.mean() if build is encoder else w
                w = w - (w @ normal) * normal
                w = w / w.norm()
                _, Jw = torch.func.jvp(lambda t, i=i: update(t, i), (x,), (w,))
                rates += float(w @ Jw) / expansion.PROBES
            lengths += float(update(x, i).norm() / c.norm())
        found = state.rates[layer].totals[0, 0]
        assert found[0] == n
        assert float(found[1]) == pytest.approx(rates, abs=2e-3 * lengths)  # the step of the difference is finite
        assert float(found[2]) == pytest.approx(lengths, rel=1e-4)


def test_stronger_ties_expand_more():
    expansions = []
    for strength in (0.2, 0.5, 1.0):
        model = matrices.gpt2(3, lambda g, gain, s=strength: matrices.tied(g, gain, s), layers=1)
        expansions.append(float(column(judged(expansion, model, BATCHES).findings, expansion.EXPANSION)))
    assert expansions == sorted(expansions)
    assert expansions[-1] > expansions[0] + 0.1


def test_every_quantity_of_a_baseline_is_a_null():
    found = judged(expansion, planted(0.3), BATCHES, baseline=matrices.gpt2(1, matrices.free))
    for f in found.findings:
        assert np.isfinite(f.value), f
        norm = ".ln_" in f.layer  # growth by norms has no null
        assert np.isfinite(f.null) is not norm, f


def test_updates_along_the_token_grow_the_cloud_but_not_along_the_sphere():
    found = judged(expansion, planted(0.3), BATCHES)
    whole, along = (column(found.findings, q) for q in (expansion.REST["attention"], expansion.ALONG["rest"]))
    assert bool((whole > 0.2).all())
    assert bool((along.abs() < 0.02).all())


def test_an_unrelated_update_grows_the_cloud_without_excess():
    found = judged(expansion, matrices.gpt2(2, matrices.free), BATCHES)
    rows = [f for f in found.findings if f.layer.endswith("attn")]
    growth, chance = column(rows, expansion.GROWTH), column(rows, expansion.GROWTH, "null")
    assert bool((growth > 0.1).all())
    assert bool(((growth - chance).abs() < 0.3 * growth).all())


def test_shards_merge_to_one_pass():
    model = planted(0.2)
    one = probed(model, BATCHES[0])
    states = [state_of(expansion, model, part, one.architecture) for part in (BATCHES, BATCHES[3:], BATCHES[:3])]
    found = [expansion.evaluate(state, one) for state in (states[0], merge(states[1], states[2]))]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64).nan_to_num() for rows in found)
    close(a, b, tolerance=1e-8)


def test_the_values_of_minilm_are_those_of_whole_covariances():
    model, _ = minilm()
    batches = token_batches(30000, rows=6, length=32, batches=2)
    one = probed(model, batches[0])
    rows = findings_of(expansion, state_of(expansion, model, batches, one.architecture), one)
    found = [capture(model, batch.inputs, architecture=one.architecture) for batch in batches]
    masks = [batch.inputs["attention_mask"].bool() for batch in batches]
    Q = expansion._directions(384, torch.device("cpu"), torch.float64).numpy()
    close(torch.from_numpy(Q.T @ Q), torch.eye(32, dtype=torch.float64))

    def joined(tensors, masks=masks):
        return np.concatenate([t[m].double().numpy() for t, m in zip(tensors, masks, strict=True)])

    def volume(x):
        return np.linalg.slogdet(np.cov((x @ Q).T, bias=True))[1] / 32

    def trace(x):
        return np.log(x.var(0).sum())

    name, norm = "encoder.layer.1.attention.self", "encoder.layer.1.attention.output.LayerNorm"
    x, u = (joined([getattr(f.sublayers[name], part) for f in found]) for part in ("stream", "update"))
    both = np.log(x.var(0).sum() + u.var(0).sum())
    sum_of_covariances = np.cov((x @ Q).T, bias=True) + np.cov((u @ Q).T, bias=True)
    expected = {
        expansion.GROWTH: (trace(x + u) - trace(x), both - trace(x)),
        expansion.VOLUME: (volume(x + u) - volume(x), np.linalg.slogdet(sum_of_covariances)[1] / 32 - volume(x)),
    }
    for quantity, (value, null) in expected.items():
        assert abs(float(column(rows, quantity, layer=name)) - value) < 1e-4, quantity
        assert abs(float(column(rows, quantity, "null", name)) - null) < 1e-4, quantity
    later = [m.clone() for m in masks]
    for m in later:
        m[:, 0] = False
    x, u = (joined([getattr(f.sublayers[name], part) for f in found], later) for part in ("stream", "update"))
    n = x - x.mean(1, keepdims=True)
    T = u - u.mean(1, keepdims=True)
    T = T - (T * n).sum(1, keepdims=True) * n / np.square(n).sum(1, keepdims=True)
    for quantity, step in ((expansion.REST["attention"], u), (expansion.ALONG["rest"], T)):
        excess = trace(x + step) - np.log(x.var(0).sum() + step.var(0).sum())
        assert abs(float(column(rows, quantity, layer=name)) - excess) < 1e-4
    given, result = (joined([getattr(f.norms[norm], part) for f in found]) for part in ("input", "result"))
    assert abs(float(column(rows, expansion.GROWTH, layer=norm)) - trace(result) + trace(given)) < 1e-4
    assert abs(float(column(rows, expansion.VOLUME, layer=norm)) - volume(result) + volume(given)) < 1e-4
