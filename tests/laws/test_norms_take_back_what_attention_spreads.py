"""Norms contract what attention spreads beyond uncorrelated updates, where it is planted.   [shim22, abstract]"""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing import capture
from gradlogz.probing.predictions import contraction
from gradlogz.probing.predictions.contraction import AFTER, BEFORE, CORRELATION, READ, SHARE, SHARE_FEED_FORWARD
from gradlogz.probing.statistics import merge
from support.architectures import ARCHITECTURES
from support.planted import matrices
from support.planted.energies import attending
from support.planted.sublayers import spreading_along_the_sphere
from support.planted.updates import bert, gpt2, opposed, positive, seeded, to_itself, untrained
from support.probe_models import details_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close

BATCHES, SMALL = (token_batches(vocabulary, rows=4, length=48) for vocabulary in (matrices.VOCABULARY, 96))


@pytest.fixture(autouse=True)
def _many_tokens(monkeypatch):
    monkeypatch.setattr(contraction, "PART", 4)


PLANTED = {  # sublayers that spread, that gather; whether the norm takes back most of their excess
    "untrained BERT": (lambda: untrained("bert", 0.02), BATCHES, "neither"),
    "untrained BERT, larger scale": (lambda: untrained("bert", 0.25), BATCHES, "neither"),
    "positive QK, free OV": (lambda: bert(positive), BATCHES, "neither"),
    "tied BERT": (lambda: bert(matrices.tied), BATCHES, "taken back"),
    "anti-tied BERT": (lambda: bert(opposed), BATCHES, "gathering"),
    "the network of the theory": (lambda: attending(0.3), SMALL, "taken back"),
    "the network of the theory, reversed": (lambda: attending(-0.3), SMALL, "gathering"),
    "update c x, undone by the norm": (to_itself, SMALL, "taken back"),
    "update -c x": (lambda: to_itself(-0.3), SMALL, "gathering"),
    "spreading along the sphere": (spreading_along_the_sphere, SMALL, "kept"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_models_are_described_as_they_are(name):
    build, batches, expected = PLANTED[name]
    found = judged(contraction, seeded(build), batches)
    counts = details_of(found)
    spreading, gathering, sublayers = counts["spreading"].count, counts["gathering"].count, counts["spreading"].total
    assert found.verdict == "described"
    if expected == "neither":
        assert 2 * max(spreading, gathering) <= sublayers
    elif expected == "gathering":
        assert gathering == sublayers
    else:
        assert spreading == sublayers
        assert (found.value > 0.5) == (expected == "taken back")


def test_lengthening_is_taken_back_and_spreading_along_the_sphere_is_not():
    lengthened, spread = (judged(contraction, seeded(f), SMALL) for f in (to_itself, spreading_along_the_sphere))
    assert 0.95 < lengthened.value < 1.05
    assert spread.value < 0.2
    assert details_of(spread)["spreading"].count == spread.judged == 1


def test_a_pre_norm_model_is_described():
    found = judged(contraction, gpt2(matrices.tied), BATCHES)
    assert set(remarks_of(found)) == {"pre-norm"}
    assert details_of(found)[READ].value == contraction.median(f.value for f in found.findings if f.quantity == READ)
    assert not math.isnan(details_of(found)[CORRELATION].value)


@pytest.mark.parametrize("scale", [0.02, 0.25])
@pytest.mark.parametrize("layers", [4, pytest.param(40, marks=pytest.mark.long)])
def test_layers_of_random_weights_seldom_spread_or_gather(scale, layers):
    counts = details_of(judged(contraction, untrained("bert", scale, seed=1, layers=layers), BATCHES))
    assert counts["spreading"].total == layers
    allowed = 0.05 * layers + 3 * (0.05 * 0.95 * layers) ** 0.5
    assert max(counts["spreading"].count, counts["gathering"].count) <= allowed


def test_every_quantity_is_its_definition(monkeypatch):
    """All tokens; the other token of a token is half a sequence away."""
    monkeypatch.setattr(contraction, "PART", 1)
    model = bert(matrices.tied).double()
    batches = token_batches(matrices.VOCABULARY, rows=3, length=24, padded=False)
    known = probed(model, batches[0])
    rows = {
        (m.layer, m.quantity): m.value
        for m in contraction.evaluate(state_of(contraction, model, batches, known.architecture), known)
    }
    passed = [capture(model, b.inputs, architecture=known.architecture).sublayers for b in batches]
    for sublayer in known.architecture.sublayers:
        x, u = (torch.cat([getattr(p[sublayer.name], k) for p in passed]).numpy() for k in ("stream", "update"))
        x, u = (t - t.mean(-1, keepdims=True) for t in (x, u))  # LayerNorm subtracts the mean over features
        other = np.roll(u, -12, axis=1)
        other *= np.linalg.norm(u, axis=-1, keepdims=True) / np.linalg.norm(other, axis=-1, keepdims=True)

        def spread(t):
            return np.trace(np.cov(t.reshape(-1, matrices.WIDTH).T, bias=True))

        def on_sphere(t):
            return t / np.linalg.norm(t, axis=-1, keepdims=True)

        before = np.log(spread(x + u) / spread(x + other))
        after = np.log(spread(on_sphere(x + u)) / spread(on_sphere(x + other)))
        across = [np.trace(np.cov(x.reshape(-1, 32).T, t.reshape(-1, 32).T, bias=True)[:32, 32:]) for t in (u, other)]
        attention = sublayer.kind == "attention"
        names = (CORRELATION, BEFORE, AFTER)
        names = names if attention else tuple(contraction.OF_FEED_FORWARD[name] for name in names)
        expected = (across[0] - across[1]) / np.sqrt(spread(x) * spread(u)), before, after
        for name, value in zip(names, expected, strict=True):
            assert abs(rows[sublayer.name, name] - value) < 1e-10, name
        share = rows[sublayer.name, SHARE if attention else SHARE_FEED_FORWARD]
        assert math.isnan(share) or abs(share - (1 - after / before)) < 1e-9
    assert any(not math.isnan(rows[s.name, SHARE]) for s in known.architecture.sublayers if s.kind == "attention")


def test_rotated_updates_are_the_null(monkeypatch):
    monkeypatch.setattr(contraction, "PART", 1)
    model = bert(matrices.tied).double()
    batches = token_batches(matrices.VOCABULARY, rows=3, length=24, padded=False)
    known = probed(model, batches[0])
    state = state_of(contraction, model, batches, known.architecture)
    name = known.architecture.attention[0]
    passed = [capture(model, b.inputs, architecture=known.architecture).sublayers[name] for b in batches]
    x, u = (torch.cat([getattr(p, k) for p in passed]) for k in ("stream", "update"))
    x, u = (t - t.mean(-1, keepdim=True) for t in (x, u))
    other = u.roll(-12, 1)
    other = other * u.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True)
    turned = contraction.rotated(u - other).flatten(0, 1)
    about = [t.flatten(0, 1) - t.flatten(0, 1).mean(0) for t in (x, u)]
    across = ((turned - turned.mean(0)) * about[0].unsqueeze(1)).sum((0, 2))
    expected = across / (about[0].square().sum() * about[1].square().sum()).sqrt()
    close(contraction._rotated_correlations(state[name]), expected, tolerance=1e-10)
    (row,) = (n for n in contraction.null(state, known, None) if n.layer == name)
    assert row.low < row.value < row.high


def test_shards_merge_to_one_pass():
    model = bert(matrices.tied)
    one = probed(model, BATCHES[0])
    parts = [state_of(contraction, model, part, one.architecture) for part in (BATCHES, BATCHES[5:], BATCHES[:5])]
    found = [contraction.evaluate(state, one) for state in (parts[0], merge(parts[1], parts[2]))]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64).nan_to_num() for rows in found)
    close(a, b, tolerance=1e-9)


def test_flattened_streams_and_models_without_norms_are_judged_where_they_can_be():
    opt = next(a for a in ARCHITECTURES if a.name == "opt").build()
    batches = token_batches(64, rows=3, length=24)
    found = judged(contraction, opt, batches)
    measured = {f.quantity for f in found.findings}
    assert {READ, contraction.READ_FEED_FORWARD} <= measured
    assert contraction.verdict([]).verdict == "not applicable"
