"""Symmetry and directionality of logit forms, by their definitions.   [saponati25]"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz.probing.predictions import symmetry
from support.planted import matrices
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=2, length=12, batches=1)


def column(findings, quantity, field="value"):
    return torch.tensor([getattr(f, field) for f in findings if f.quantity == quantity], dtype=torch.float64)


def loud(side):
    """Heads of which one coordinate is large on the side of queries, 0, or of keys, 1."""

    def heads(generator, gain):
        W = matrices.random_heads(generator)
        W[side][:, 3] *= 8
        return W

    return heads


def test_symmetric_forms_have_1_antisymmetric_ones_minus_1():
    found = judged(symmetry, matrices.gpt2(0, matrices.alike), BATCHES)
    assert found.verdict == "described"
    close(column(found.findings, symmetry.SYMMETRY), torch.ones(2, dtype=torch.float64), tolerance=1e-5)
    found = judged(symmetry, matrices.gpt2(0, matrices.crossed), BATCHES)
    assert found.verdict == "described"
    close(column(found.findings, symmetry.SYMMETRY), -torch.ones(2, dtype=torch.float64), tolerance=1e-5)


def test_free_forms_have_scores_near_0():
    found = judged(symmetry, matrices.gpt2(1, matrices.free), BATCHES)
    assert found.verdict == "described"
    assert abs(found.value) < 0.1


@pytest.mark.parametrize(("side", "sign"), [(0, 1), (1, -1)])
def test_large_rows_are_positive_and_large_columns_negative(side, sign):
    rows = judged(symmetry, matrices.gpt2(2, loud(side)), BATCHES).findings
    assert bool((sign * column(rows, symmetry.DIRECTIONALITY) > 0.3).all())


def test_one_large_column_may_be_chance_and_many_are_not():
    """Exchanged with its row at random, a single one is a row as often."""
    one = probed(matrices.gpt2(0, matrices.free), BATCHES[0])
    layer = one.architecture.attention[0]
    alone = replace(one, architecture=one.architecture._replace(attention=(layer,)))
    generator = torch.Generator().manual_seed(0)
    for many, apart in ((1, False), (8, True)):
        Wq, Wk = torch.randn(2, 2, 300, 20, generator=generator, dtype=torch.float64)
        Wk[:, :many] *= 9
        weights = {layer: one.weights[layer]._replace(query=Wq, key=Wk)}
        rows = findings_of(symmetry, {}, replace(alone, weights=weights))
        value, low = column(rows, symmetry.DIRECTIONALITY), column(rows, symmetry.DIRECTIONALITY, "null_low")
        assert float(value) < -0.3
        assert bool(value < low) is apart


def test_forms_that_are_more_alike_have_a_larger_score():
    scores = []
    for strength in (0.0, 0.4, 0.7, 0.9, 1.0):
        model = matrices.gpt2(3, lambda generator, gain, s=strength: matrices.alike(generator, gain, s))
        found = judged(symmetry, model, BATCHES)
        scores.append(found.value)
    assert scores == sorted(scores)
    assert scores[0] < 0.1
    assert scores[-1] > 0.99


def test_random_layers_have_small_scores_and_stay_in_their_bands():
    one = probed(matrices.gpt2(0, matrices.free), BATCHES[0])
    layer = one.architecture.attention[0]
    alone = replace(one, architecture=one.architecture._replace(attention=(layer,)))
    generator = np.random.default_rng(0)
    findings = []
    for seed in range(200):
        Wq, Wk, _, _ = (torch.from_numpy(W) for W in matrices.random_heads(generator))
        model = replace(alone, weights={layer: one.weights[layer]._replace(query=Wq, key=Wk)}, seed=seed)
        findings += findings_of(symmetry, {}, model)
    assert not bool((column(findings, symmetry.SYMMETRY) > 0.5).any())
    for quantity in (symmetry.SYMMETRY, symmetry.DIRECTIONALITY):
        value, low, high = (column(findings, quantity, field) for field in ("value", "null_low", "null_high"))
        assert len(value) == 200
        assert float(((value < low) | (value > high)).double().mean()) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5, quantity


def test_the_null_of_symmetry_is_that_of_rotations():
    generator = torch.Generator().manual_seed(0)
    U, V = torch.randn(2, 40, 12, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(torch.randn(4000, 40, 40, generator=generator, dtype=torch.float64))
    draws = symmetry.symmetry(U, (Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)) @ V)
    assert abs(float(draws.mean()) - 1 / 40) < 4 * 2**0.5 / 40 / 4000**0.5
    assert abs(float(draws.std()) / (2**0.5 / 40) - 1) < 0.06


def test_the_scores_of_minilm_are_those_of_whole_matrices():
    model, given = minilm()
    batch = BATCHES[0]._replace(inputs=dict(given))
    rows = findings_of(symmetry, {}, probed(model, batch))
    for number, layer in enumerate(model.encoder.layer):
        own = layer.attention.self
        Q, K = (W.weight.detach().double().numpy().T for W in (own.query, own.key))
        M = Q @ K.T
        here = [f for f in rows if f.layer == f"encoder.layer.{number}.attention.self"]
        S, A = (M + M.T) / 2, (M - M.T) / 2
        score = ((S**2).sum() - (A**2).sum()) / (M**2).sum()
        assert abs(float(column(here, symmetry.SYMMETRY)) - score) < 1e-5
        excess = []
        for axis in (1, 0):
            norms = np.linalg.norm(M, axis=axis)
            edge = norms.mean() + 2 * norms.std(ddof=1)
            excess.append((norms[norms > edge] - edge).sum())
        expected = (excess[0] - excess[1]) / sum(excess)
        assert abs(float(column(here, symmetry.DIRECTIONALITY)) - expected) < 1e-4
        heads = [Q[:, i : i + 32] @ K[:, i : i + 32].T for i in range(0, 384, 32)]
        each = torch.tensor([np.trace(B @ B) / (B**2).sum() for B in heads], dtype=torch.float64)
        close(column(here, symmetry.OF_HEAD), each, tolerance=1e-5)
