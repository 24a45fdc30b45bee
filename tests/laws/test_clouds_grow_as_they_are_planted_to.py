"""Attention that adds a token to itself is found to spread the cloud, its opposite to gather it.   [theory 5.1, E15]"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.predictions import expansion
from gradlogz.probing.statistics import comoments_of, merge
from support.planted import matrices
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=32)
JUDGED = expansion.REST["attention"]


@pytest.fixture(autouse=True)
def _every_token(monkeypatch):
    monkeypatch.setattr(expansion, "PART", 1)


def planted(step, seed=0):
    return matrices.gpt2(seed, lambda generator, gain: matrices.spreading(generator, gain, step))


def column(findings, quantity, field="value", layer=None):
    found = [getattr(f, field) for f in findings if f.quantity == quantity and layer in (None, f.layer)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("step", "verdict"), [(0.3, "supported"), (-0.3, "refuted")])
def test_planted_growth_is_judged(step, verdict):
    found = judged(expansion, planted(step), BATCHES, baseline=matrices.gpt2(1, matrices.free))
    assert found.verdict == verdict
    for f in found.findings:
        flat = f.quantity == expansion.VOLUME and ".ln_" in f.layer  # centred tokens have no volume in the whole stream
        assert np.isfinite(f.value) is not flat
        assert np.isfinite(f.null) is not flat


def test_growth_that_random_weights_show_is_no_finding():
    found = judged(expansion, planted(0.1), BATCHES, baseline=planted(0.3, seed=1))
    assert found.verdict == "inconclusive"
    value, null, high = (column(found.findings, JUDGED, field) for field in ("value", "null", "null_high"))
    assert bool((value > expansion.BOUND).all())
    assert bool((null > value).all())
    assert bool((high >= null).all())


def test_an_unrelated_update_grows_the_cloud_without_excess():
    found = judged(expansion, matrices.gpt2(2, matrices.free), BATCHES)
    rows = [f for f in found.findings if f.layer.endswith("attn")]
    growth, chance = column(rows, expansion.GROWTH), column(rows, expansion.GROWTH, "null")
    assert bool((growth > 0.1).all())
    assert bool(((growth - chance).abs() < 0.3 * growth).all())


def test_larger_steps_are_found_more_often():
    excess, supported = [], []
    for step in (-0.2, 0.0, 0.003, 0.02, 0.2):
        rows = [f for f in judged(expansion, planted(step), BATCHES).findings if f.quantity == JUDGED]
        excess.append(float(column(rows, JUDGED).mean()))
        supported.append(sum(f.verdict == "supported" for f in rows))
    assert excess == sorted(excess)
    assert supported == sorted(supported)
    assert (supported[0], supported[-1]) == (0, 2)


def test_unrelated_updates_are_seldom_supported_and_stay_in_the_band():
    """200 sublayers whose updates have nothing to do with their tokens."""
    one = probed(planted(0.1), BATCHES[0])
    names = [f"layer {i}" for i in range(200)]
    sublayer = one.architecture.branch_of(one.architecture.attention[0])
    alone = replace(
        one, architecture=one.architecture._replace(sublayers=tuple(sublayer._replace(name=n) for n in names))
    )
    generator = torch.Generator().manual_seed(0)
    spread = volume = None
    for group in range(8):
        x, u = torch.randn(2, 200, 250, 6, generator=generator, dtype=torch.float64)
        clouds, zero = torch.stack((x, u, x + u), 1), torch.zeros(200, 3, 250, 1, dtype=torch.float64)
        spread = merge(spread, comoments_of(zero, clouds, group=group, yy="trace"))
        volume = merge(volume, comoments_of(torch.cat((x, u), -1), group=group))
    state = {"": expansion.StackState("\n".join(names), volume, spread, spread)}
    findings = findings_of(expansion, state, alone)
    value, low, high = (column(findings, JUDGED, field) for field in ("value", "null_low", "null_high"))
    chance = 3 * (0.05 * 0.95 / 200) ** 0.5
    assert len(value) == 200
    assert float(((value < low) | (value > high)).double().mean()) < 0.05 + chance
    supported = column(findings, JUDGED, "low") > high.clamp(min=expansion.BOUND)
    assert float(supported.double().mean()) < 0.05 + chance


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
        expansion.EXCESS["attention"]: (trace(x + u) - both, 0.0),
        expansion.VOLUME: (volume(x + u) - volume(x), np.linalg.slogdet(sum_of_covariances)[1] / 32 - volume(x)),
    }
    for quantity, (value, null) in expected.items():
        assert abs(float(column(rows, quantity, layer=name)) - value) < 1e-4, quantity
        assert abs(float(column(rows, quantity, "null", name)) - null) < 1e-4, quantity
    later = [m.clone() for m in masks]
    for m in later:
        m[:, 0] = False
    x, u = (joined([getattr(f.sublayers[name], part) for f in found], later) for part in ("stream", "update"))
    assert abs(float(column(rows, JUDGED, layer=name)) - trace(x + u) + np.log(x.var(0).sum() + u.var(0).sum())) < 1e-4
    given, result = (joined([getattr(f.norms[norm], part) for f in found]) for part in ("input", "result"))
    assert abs(float(column(rows, expansion.GROWTH, layer=norm)) - trace(result) + trace(given)) < 1e-4
    assert abs(float(column(rows, expansion.VOLUME, layer=norm)) - volume(result) + volume(given)) < 1e-4
