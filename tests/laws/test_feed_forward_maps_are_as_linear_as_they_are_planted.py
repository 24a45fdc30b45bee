"""Affine feed-forward maps are found to be so, bent ones not.   [theory 12]"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.predictions import linearity
from gradlogz.probing.statistics import affine_fit, comoments_of, merge
from support.planted import matrices
from support.pretrained import minilm
from support.probe_models import judged, probed, remarks_of, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=32)


def planted(linear, seed=0):
    model = matrices.gpt2(seed, matrices.free, layers=2, activation="relu")
    return matrices.bend(model, seed, linear)


ONE = probed(planted(1.0), BATCHES[0])
(SUBLAYER, *_) = (s for s in ONE.architecture.sublayers if s.kind == "feed_forward")
NAME, ONE = SUBLAYER.name, replace(ONE, architecture=ONE.architecture._replace(sublayers=(SUBLAYER,)))


def value(findings, quantity, layer=None):
    found = [f.value for f in findings if f.quantity == quantity and layer in (None, f.layer)]
    return torch.tensor(found, dtype=torch.float64)


def test_an_affine_map_is_explained():
    found = judged(linearity, planted(1.0), BATCHES)
    assert (found.verdict, found.judged, found.supported) == ("described", 2, 0)
    assert float(value(found.findings, linearity.HELD_OUT).min()) > 1 - 1e-4
    assert all(np.isfinite(f.null) == (f.quantity == linearity.IN_SAMPLE) for f in found.findings)
    assert found.remarks == ()


def test_a_bent_map_is_not_explained_though_its_score_is_high():
    model = planted(0.0)
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_proj.weight *= 0.1  # the stream explains itself
    found = judged(linearity, model, BATCHES)
    assert found.value < 0.5
    assert float(value(found.findings, linearity.SCORE).min()) > 0.95
    assert float(value(found.findings, linearity.IDENTITY).min()) > 0.9


def test_straighter_maps_are_explained_better():
    explained = []
    for linear in (0.0, 0.4, 0.6, 0.8, 1.0):
        rows = [f for f in judged(linearity, planted(linear), BATCHES).findings if f.quantity == linearity.HELD_OUT]
        explained.append(rows[0].value)  # later ones read what the first has bent
    assert explained == sorted(explained)
    assert explained[0] < 0.3


def test_updates_without_relation_are_not_explained():
    """200 sublayers whose updates are noise: nothing is explained held out, p / (n - 1) in sample."""
    generator = torch.Generator().manual_seed(0)
    state = None
    for group in range(8):
        x, y = torch.randn(2, 200, 20, 8, generator=generator, dtype=torch.float64)
        state = merge(state, comoments_of(x, y, group=group, yy="diagonal"))
    fit = affine_fit(state)
    assert float((fit.held_out.low > 0).double().mean()) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    (expected,) = (m.value for m in linearity.null({NAME: linearity.LayerState(state)}, ONE, None))
    assert expected == 8 / 159
    assert abs(float(fit.in_sample.mean()) - expected) < 4 * float(fit.in_sample.std()) / 200**0.5


def test_too_few_tokens_are_remarked():
    """As many tokens as coordinates: any fit is perfect in sample and useless held out."""
    found = judged(linearity, planted(0.0), token_batches(matrices.VOCABULARY, rows=1, length=4))
    assert found.verdict == "described"
    assert 0 < remarks_of(found)["few_tokens"].numbers["ratio"] < 2


def test_shards_merge_to_one_pass():
    model = planted(0.5)
    one = probed(model, BATCHES[0])
    parts = [state_of(linearity, model, part, one.architecture) for part in (BATCHES, BATCHES[5:], BATCHES[:5])]
    found = [linearity.evaluate(state, one) for state in (parts[0], merge(parts[1], parts[2]))]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64).nan_to_num() for rows in found)
    close(a, b, tolerance=1e-9)


@pytest.mark.parametrize("post", [True, False])
def test_every_quantity_is_that_of_least_squares(post):
    if post:
        model, _ = minilm()
        model.double()
        batches = token_batches(30000, rows=6, length=32, batches=4)
        name, keep = "encoder.layer.2", 24
    else:
        model, batches, name, keep = planted(0.7).double(), BATCHES, "transformer.h.1.mlp", matrices.WIDTH
    layout = probed(model, batches[0])
    one = tuple(s for s in layout.architecture.sublayers if s.name == name)
    alone = replace(layout, architecture=layout.architecture._replace(sublayers=one))
    try:
        state = state_of(linearity, model, batches, alone.architecture)
        x, z, u = [], [], []
        for batch in batches:
            found = capture(model, batch.inputs, architecture=layout.architecture).sublayers[name]
            seen = batch.inputs["attention_mask"].bool()
            for store, t in ((x, found.stream), (z, found.input), (u, found.update)):
                store.append(t[seen].numpy())
    finally:
        model.float()
    rows = {m.quantity: m.value for m in linearity.evaluate(state, alone)}
    whole = {k: np.concatenate(v) for k, v in (("x", x), ("z", z), ("u", u))}
    for quantity, source, target in (
        (linearity.IN_SAMPLE, whole["z"], whole["u"]),
        (linearity.SCORE, whole["x"], whole["x"] + whole["u"]),
    ):
        X, Y = source - source.mean(0), target - target.mean(0)
        A = np.linalg.lstsq(X, Y, rcond=None)[0]
        assert abs(rows[quantity] - (1 - ((Y - X @ A) ** 2).sum() / (Y**2).sum())) < 1e-6
    missed = total = 0.0
    for g in range(len(batches)):
        rest = [i for i in range(len(batches)) if i != g]
        Z, U = (np.concatenate([t[i] for i in rest]) for t in (z, u))
        A = np.linalg.lstsq(np.c_[Z, np.ones(len(Z))], U, rcond=None)[0]
        missed += ((u[g] - np.c_[z[g], np.ones(len(z[g]))] @ A) ** 2).sum()
        total += ((u[g] - U.mean(0)) ** 2).sum()
    assert abs(rows[linearity.HELD_OUT] - (1 - missed / total)) < 1e-4 * keep
    C = np.cov(whole["x"].T, bias=True)
    assert abs(rows[linearity.ANISOTROPY] - np.linalg.eigvalsh(C)[-1] / np.trace(C)) < 1e-9
    B = np.linalg.lstsq(whole["x"] - whole["x"].mean(0), whole["u"] - whole["u"].mean(0), rcond=None)[0]
    assert abs(rows[linearity.DISTANCE] - np.sqrt(np.trace(B.T @ C @ B) / np.trace(C))) < 1e-6
    after = whole["x"] + whole["u"]
    assert abs(rows[linearity.IDENTITY] - (1 - whole["u"].var(0).sum() / after.var(0).sum())) < 1e-9
