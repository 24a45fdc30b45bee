"""eta -> ∇G(eta) is one-to-one exactly modulo the directions in which no two keys differ.   [theory E5]

The covariance has rank dim aff(keys) <= n - 1, and the image is the relative interior of the hull of the keys. The
paper says one-to-one without the condition (its Eq. 4); with n <= d keys that is false.
"""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("E5",)

shapes = {"seed": seeds, "n": st.integers(1, 5), "span": st.integers(1, 3)}


def keys_on_a_flat(seed, n, span):
    """n keys in general position on a flat of this dimension in R^4; the flat's directions and those across it."""
    s = Source(seed)
    q, _ = torch.linalg.qr(s.normal(4, 4))
    inside, across = q[:, :span], q[:, span:]
    return s.normal(n, span) @ inside.mT + s.normal(4), across, s


@given(**shapes)
def test_the_covariance_has_the_rank_of_the_affine_hull(seed, n, span):
    keys, _, s = keys_on_a_flat(seed, n, span)
    F = gz.Empirical(keys).covariance(s.normal(4))
    assert int(torch.linalg.matrix_rank(F, atol=1e-12, rtol=1e-12, hermitian=True)) == min(n - 1, span)


@given(**shapes)
def test_moving_across_the_flat_changes_nothing(seed, n, span):
    keys, across, s = keys_on_a_flat(seed, n, span)
    h, eta, away = gz.Empirical(keys), s.normal(4), across @ s.normal(4 - span)
    close(h.mean(eta + away), (keys @ eta).softmax(-1) @ keys, scale_of(h, eta + away))


@given(**shapes)
def test_moving_along_the_flat_moves_the_mean_the_same_way(seed, n, span):
    keys, _, s = keys_on_a_flat(seed, n, span)
    h, a = gz.Empirical(keys), s.normal(4)
    step = keys[-1] - keys[0]
    both = (keys @ a).softmax(-1)[[0, -1]].prod() * step.norm() ** 4  # <= Var<x, step> at a
    assume(n == 1 or float(both) > 1e-9)
    along = float(((h.mean(a + step) - h.mean(a)) * step).sum())
    assert along > 0 if n > 1 else along == 0


@given(seed=seeds)
def test_the_mean_lies_strictly_inside_the_hull(seed):
    s = Source(seed)
    simplex = s.normal(4, 3)  # 4 affinely independent keys of R^3: barycentric coordinates are unique
    mean = gz.Empirical(simplex).mean(s.normal(3))
    system = torch.cat((simplex.mT, torch.ones(1, 4, dtype=mean.dtype)))
    weights = torch.linalg.solve(system, torch.cat((mean, mean.new_ones(1))))
    assert bool((weights > 0).all())


@given(**shapes)
def test_every_point_of_the_relative_interior_is_attained(seed, n, span):
    keys, across, s = keys_on_a_flat(seed, n, span)
    u = s.log_simplex(n).exp() @ keys
    eta = gz.measures.mean_to_natural(gz.Empirical(keys), u)
    close((keys @ eta).softmax(-1) @ keys, u, 1 + keys.abs().max(), tolerance=1e-8)
    close(across.mT @ eta, torch.zeros(4 - span, dtype=u.dtype), 1 + eta.norm(), tolerance=1e-8)
