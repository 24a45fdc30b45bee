"""Observables of a cloud, against their definitions.   [theory 12, dong21]"""

import math

import numpy
import pytest
import torch
from scipy.optimize import linprog

from gradlogz import Ascent, evolve
from support.scales import close

F64 = torch.float64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def observed(cloud, name, steps=0, ascent=None, **options):
    return evolve(cloud, ascent or Ascent(), steps=steps, observe=[name], **options).observed[name]


# The residual ---------------------------------------------------------------------------------------------------------


def composite(x):
    return math.sqrt(float(torch.linalg.matrix_norm(x, 1)) * float(torch.linalg.matrix_norm(x, math.inf)))


def least_composite(x):
    """min over v of sqrt(|X - 1 v'|_1 |X - 1 v'|_inf), by linear programs.

    4 a b is the least over s > 0 of (s a + b / s)²; for each s the least of s a(v) + b(v) / s is a linear program in
    v, a, b and the entries' bounds r >= |x - v|.
    """
    x = x.numpy()
    n, d = x.shape
    r = numpy.arange(n * d).reshape(n, d) + d + 2
    rows, right = [], []
    for i in range(n):
        for j in range(d):
            for sign in (1.0, -1.0):  # sign (x_ij - v_j) <= r_ij
                row = numpy.zeros(d + 2 + n * d)
                row[j], row[r[i, j]] = -sign, -1.0
                rows.append(row)
                right.append(-sign * x[i, j])
    for which, sums in ((d, r.T), (d + 1, r)):  # sums of columns below a, of rows below b
        for members in sums:
            row = numpy.zeros(d + 2 + n * d)
            row[members], row[which] = 1.0, -1.0
            rows.append(row)
            right.append(0.0)
    best = math.inf
    for s in numpy.geomspace(0.05, 2.0, 60):
        cost = numpy.zeros(d + 2 + n * d)
        cost[d], cost[d + 1] = s, 1 / s
        found = linprog(cost, numpy.array(rows), numpy.array(right), bounds=[(None, None)] * (d + 2 + n * d))
        best = min(best, math.sqrt(found.x[d] * found.x[d + 1]))
    return best


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_residual_of_the_mean_is_within_twice_the_least(seed):
    x = gaussian(9, 2, seed=seed).exp() + 1.0  # skewed: the mean is not the best row
    n = len(x)
    ours = float(observed(x, "rank_one_residual")[0])
    least = least_composite(x) / composite(x)
    assert least <= ours * (1 + 1e-9)
    assert ours <= 2 * (1 - 1 / n) * least
    assert ours > 1.01 * least, "the bound is about a difference that is there"


def test_the_residual_is_the_composite_norm_without_the_mean():
    x = gaussian(4, 30, 3)
    centred = x - x.mean(-2, keepdim=True)
    expected = torch.tensor([composite(c) / composite(y) for c, y in zip(centred, x, strict=True)], dtype=F64)
    close(observed(x, "rank_one_residual")[0], expected)
    close(observed(7.0 * x, "rank_one_residual")[0], expected)


def test_the_mean_is_the_row_that_leaves_least_in_the_frobenius_norm():
    x, shift = gaussian(30, 3), 0.1 * gaussian(50, 1, 3, seed=1)
    centred = x - x.mean(-2)
    assert bool(((centred + shift).norm(dim=(-2, -1)) > centred.norm()).all())


def test_equal_tokens_have_no_residual():
    x = gaussian(1, 3).expand(20, 3)
    assert float(observed(x, "rank_one_residual")[0]) < 1e-15
    assert float(observed(torch.zeros(5, 3, dtype=F64), "rank_one_residual")[0]) == 0.0


def test_attention_alone_loses_the_residual_doubly_exponentially_and_a_residual_stream_keeps_it():
    """[dong21]: each layer at least cubes it once it is small, so that its logarithm triples."""
    x = gaussian(40, 8)
    alone = observed(x, "rank_one_residual", 6, Ascent(beta=0.2, residual=False)).log()
    assert float(alone[4]) < 3 * float(alone[3]) < 9 * float(alone[2]) < -10.0
    assert float(observed(x, "rank_one_residual", 6, Ascent(beta=0.2))[-1]) > 0.5


# Expansion and contraction --------------------------------------------------------------------------------------------


def pair_distance(x):
    return torch.cdist(x, x).square().sum((-2, -1)) / (x.shape[-2] * (x.shape[-2] - 1))


@pytest.mark.parametrize("contraction", ["rms_norm", "zca", "none"])
def test_expansion_and_contraction_are_log_ratios_of_squared_distances(contraction):
    x = gaussian(2, 30, 3)
    ascent, options = Ascent(tau=0.5, beta=0.4), {"contraction": contraction}
    between = x + 0.5 * (0.4 * x @ x.mT).softmax(-1) @ x
    after = evolve(x, ascent, steps=1, **options).cloud
    expansion, contracted = (observed(x, name, 1, ascent, **options)[1] for name in ("expansion", "contraction"))
    close(expansion, (pair_distance(between) / pair_distance(x)).log(), scale=10.0)
    close(contracted, (pair_distance(after) / pair_distance(between)).log(), scale=10.0)
    if contraction == "none":
        assert bool((contracted == 0).all())


def test_before_the_first_step_there_is_neither():
    for name in ("expansion", "contraction", "displacement"):
        assert bool(torch.isnan(observed(gaussian(9, 2), name)[0]))


def test_what_goes_before_attention_contracts_the_stream_that_it_looks_at():
    """Pre-norm: the stream expands from x to x + tau A(N x), and N takes it to what is looked at and recorded."""
    x = gaussian(30, 3)
    looked = torch.nn.functional.normalize(x, dim=-1)
    y = x + 0.5 * (looked @ looked.mT).softmax(-1) @ looked
    options = {"contraction": "sphere", "placement": "pre"}
    close(observed(x, "expansion", 1, Ascent(tau=0.5), **options)[1], (pair_distance(y) / pair_distance(x)).log(), 10.0)
    expected = (pair_distance(torch.nn.functional.normalize(y, dim=-1)) / pair_distance(y)).log()
    close(observed(x, "contraction", 1, Ascent(tau=0.5), **options)[1], expected, 10.0)


def test_over_time_they_add_up_to_the_change_of_size():
    x = gaussian(40, 3)
    found = evolve(x, Ascent(tau=0.5, beta=0.4), contraction="rms_norm", steps=20, observe=["expansion", "contraction"])
    total = found.observed["expansion"][1:].sum() + found.observed["contraction"][1:].sum()
    close(total, (pair_distance(found.cloud) / pair_distance(x)).log(), scale=100.0)
    assert bool((found.observed["expansion"][1:] > 0).all()), "attention expands"


# The effective rank ---------------------------------------------------------------------------------------------------


def test_the_effective_rank_is_the_exponential_of_an_entropy():
    scales = torch.tensor([2.0, 1.0, 0.5], dtype=F64)
    x = gaussian(40, 3)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.mT))).mT * scales + 7.0
    p = (scales.square() / scales.square().sum()).tolist()
    assert float(observed(x, "effective_rank")[0]) == pytest.approx(math.exp(-sum(q * math.log(q) for q in p)))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_cloud_that_has_collapsed_to_rounding_has_no_effective_rank(dtype):
    """Its covariance is rounding noise. Until then the rank stays that of a cloud of full rank."""
    found = evolve(
        gaussian(100, 8).to(dtype), Ascent(tau=0.5, beta=0.01), contraction="layer_norm", steps=300,
        observe=["effective_rank"], every=20,
    )  # fmt: skip
    rank = found.observed["effective_rank"]
    assert found.verdict.kind == "collapsed"
    assert bool(torch.isnan(rank[-1]))
    assert bool(rank[torch.isfinite(rank)].min() > 5.5)
    for tokens in (torch.ones(5, 3, dtype=dtype), torch.zeros(5, 3, dtype=dtype)):
        assert bool(torch.isnan(observed(tokens, "effective_rank")[0]))


def test_a_small_cloud_far_away_has_its_effective_rank():
    x = gaussian(50, 3)
    near = float(observed(x, "effective_rank")[0])
    assert float(observed(1e-9 * x + 1.0, "effective_rank")[0]) == pytest.approx(near, rel=1e-5)
