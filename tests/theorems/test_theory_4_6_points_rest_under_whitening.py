"""Laws on points on which attention is affine rest under whitening; which of them attract.   [theory 4.6]

attention is parallel to each of d + 1 whitened points, whatever their weights: they rest
more points rest, up to a rotation, only if attention is affine on them: a simplex and its centre, products
deviations inside clusters and of their places grow by the factors of cluster_stability, here measured on tokens
a departure inside the clusters of the symmetric law on two points is multiplied by
(1 + tau beta sech² beta) / (1 + tau tanh beta) < 1,   since beta < sinh beta cosh beta
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Ascent, evolve
from gradlogz.dynamics import centered_simplex_factors, cluster_stability
from support.scales import close

STATEMENTS = ("4.6",)

F64 = torch.float64
taus, betas = st.floats(0.01, 5.0), st.floats(0.05, 5.0)


def step(cloud, tau, beta):
    return evolve(cloud, Ascent(tau=tau, beta=beta), contraction="zca", steps=1).cloud


@given(share=st.integers(1, 9), tau=taus, beta=betas)
def test_on_the_line_every_standardised_law_on_two_points_rests(share, tau, beta):
    cloud = torch.where(torch.arange(10) < share, math.sqrt((10 - share) / share), -math.sqrt(share / (10 - share)))
    cloud = cloud.to(F64).unsqueeze(-1)
    cloud = (cloud - cloud.mean()) / cloud.std(correction=0)
    close(step(cloud, tau, beta), cloud, scale=10 * (1 + beta * float(cloud.abs().max()) ** 2))


@given(seed=st.integers(0, 10_000), d=st.integers(2, 5), tau=taus, beta=st.floats(0.05, 1.0))
def test_one_point_more_than_dimensions_rests_token_by_token(seed, d, tau, beta):
    """Random points, one of them three times."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randn(d + 1, d, generator=generator, dtype=F64)
    cloud = evolve(torch.cat((corners, corners[:1], corners[:1])), Ascent(tau=0.0), contraction="zca", steps=1).cloud
    close(step(cloud, tau, beta), cloud, scale=1e3)


@pytest.mark.parametrize("d", [2, 4])
def test_the_regular_simplex_rests_token_by_token(d):
    basis = torch.eye(d + 1, dtype=F64) - 1 / (d + 1)
    cloud = torch.linalg.svd(basis).U[:, :d] * math.sqrt(d + 1)
    close(step(cloud, 0.5, 0.4), cloud, scale=10.0)


@given(tau=taus, beta=betas)
def test_a_departure_inside_the_two_clusters_shrinks_by_the_factor(tau, beta):
    """Tokens at 1 and -1, half of each a little farther and half a little nearer: the moments stay to first order."""
    sides = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    inside = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)

    def after(eps):
        x = sides + eps * inside
        y = x + tau * (beta * x.unsqueeze(-1) * x).softmax(-1) @ x
        centred = y - y.mean()
        return (centred / centred.square().mean().sqrt() * inside).mean()

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    _, factor = torch.func.jvp(after, (zero,), (one,))
    expected = (1 + tau * beta / math.cosh(beta) ** 2) / (1 + tau * math.tanh(beta))
    assert float(factor) == pytest.approx(expected, abs=1e-12)
    assert expected < 1, "stable"
    eps = 1e-4
    found = step((sides + eps * inside).unsqueeze(-1), tau, beta).squeeze(-1)
    assert float((found * inside).mean()) / eps == pytest.approx(expected, abs=1e-6)


# More clusters than d + 1 ---------------------------------------------------------------------------------------------


def simplex(d, share=0.0):
    """Whitened corners of a regular simplex, with this share of the tokens at the centre, and the shares."""
    corners = torch.linalg.svd(torch.eye(d + 1, dtype=F64) - 1 / (d + 1)).U[:, :d]
    corners = corners / corners.norm(dim=-1, keepdim=True) * math.sqrt(d / (1 - share))
    weights = torch.full((d + 1,), (1 - share) / (d + 1), dtype=F64)
    if not share:
        return corners, weights
    center = torch.zeros(1, d, dtype=F64)
    return torch.cat((center, corners)), torch.cat((torch.tensor([share], dtype=F64), weights))


def tokens_of(centers, counts):
    return centers.repeat_interleave(torch.tensor(counts), 0)


@given(d=st.integers(2, 6), share=st.floats(0.05, 0.95), tau=taus, beta=st.floats(0.05, 1.5))
def test_a_simplex_and_its_centre_rest_with_the_factors_of_the_formula(d, share, tau, beta):
    centers, weights = simplex(d, share)
    found = cluster_stability(centers, weights, beta=beta, tau=tau)
    factors = centered_simplex_factors(d, beta=beta, tau=tau, share=share)
    scale = 100 / (1 - share) ** 2
    assert float(found.residual) < 1e-12 * scale
    close(found.within[0], torch.tensor(factors.center, dtype=F64), scale)
    close(found.within[1:], torch.full((d + 1,), factors.corner, dtype=F64), scale)
    close(found.shape, torch.full((d,), abs(factors.shape), dtype=F64), 1e4 * scale)


@pytest.mark.parametrize(("d", "counts", "beta"), [(2, [60, 4, 4, 4], 0.3), (3, [20, 5, 5, 5, 5], 0.6)])
def test_the_factors_are_those_of_tokens(d, counts, beta):
    """Two tokens of a cluster apart, and the cluster at the centre moved against the others, through evolve."""
    tau, eps = 0.5, 1e-6
    n = sum(counts)
    centers, _ = simplex(d, counts[0] / n)
    cloud = tokens_of(centers, counts)
    close(step(cloud, tau, beta), cloud, scale=100.0)
    factors = centered_simplex_factors(d, beta=beta, tau=tau, share=counts[0] / n)
    apart = torch.zeros_like(cloud)
    apart[0, 0], apart[1, 0] = eps, -eps
    after = step(cloud + apart, tau, beta)
    assert float((after[0] - after[1]).norm()) / (2 * eps) == pytest.approx(factors.center, abs=1e-5)
    corner = cloud[-1] / cloud[-1].norm()
    largest = []
    for direction in (corner, torch.linalg.svd(corner.unsqueeze(0)).Vh[-1]):
        apart = torch.zeros_like(cloud)
        apart[-1], apart[-2] = eps * direction, -eps * direction
        after = step(cloud + apart, tau, beta)
        largest.append(float((after[-1] - after[-2]).norm()) / (2 * eps))
    assert max(largest) == pytest.approx(factors.corner, abs=1e-5)
    moved = torch.zeros_like(cloud)
    moved[: counts[0], 0] = eps
    moved = moved - moved.mean(0)
    after = step(cloud + moved, tau, beta) - cloud
    apart = after[0] - after[counts[0] :].mean(0)
    assert float(apart[0]) / eps == pytest.approx(factors.shape, abs=1e-5)


@given(seed=st.integers(0, 10_000), d=st.integers(1, 5), tau=taus, beta=st.floats(0.05, 1.0))
def test_one_cluster_more_than_dimensions_is_stable_by_a_closed_form(seed, d, tau, beta):
    """att(c) = alpha c at each corner, alpha = g / (1 + g), g = w (exp(beta / w) - 1); no rotation, any shares."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (d + 1,), generator=generator)
    corners = torch.randn(d + 1, d, generator=generator, dtype=F64)
    cloud = evolve(tokens_of(corners, counts.tolist()), Ascent(tau=0.0), contraction="zca", steps=1).cloud
    c, w = cloud[counts.cumsum(0) - 1], counts.to(F64) / counts.sum()
    g = w * torch.expm1(beta / w)
    scale = 1e4 / w.min() ** 2
    attended = Ascent(beta=beta).attended(cloud)[0][counts.cumsum(0) - 1]
    close(attended, (g / (1 + g)).unsqueeze(-1) * c, scale)
    close(step(cloud, tau, beta), cloud, scale)
    # beta F_k < A, with F_k = (I + g / (1 + g) c c^T) / (1 + g) and A = sum w alpha c c^T, both symmetric.
    eye = torch.eye(d, dtype=F64)
    A = (w * g / (1 + g)) * c.mT @ c
    F = [(eye + y * torch.outer(x, x) / (1 + y)) / (1 + y) for x, y in zip(c, g, strict=True)]
    factors = [torch.linalg.eigvals(torch.linalg.solve(eye + tau * A, eye + tau * beta * f)).real.max() for f in F]
    found = cluster_stability(c, w, beta=beta, tau=tau)
    close(found.within, torch.stack(factors), scale)
    smallest = min(float(torch.linalg.eigvalsh(A - beta * f)[0]) for f in F)
    assert found.stable == (smallest > 0) or abs(smallest) < 1e-9
    assert found.shape.shape == (0,)


@given(d=st.integers(2, 6), share=st.floats(0.05, 0.95), beta=st.floats(0.05, 1.5), tau=taus)
def test_stability_does_not_depend_on_the_step_size_and_needs_beta_below_one(d, share, beta, tau):
    few, many = (centered_simplex_factors(d, beta=beta, tau=t, share=share) for t in (tau, 100 * tau))
    for one, other in zip(few, many, strict=True):
        assert (one < 1) == (other < 1) or abs(one - 1) < 1e-9
    if beta >= 1:
        assert few.center > 1


def test_the_simplex_of_equal_shares_falls_apart_at_small_beta():
    """beta f1 < alpha is beta (d+1)² e^u < (e^u - 1)(e^u + d), u = beta (d+1): false for small beta if d > 1."""
    for d, beta, stable in ((2, 0.2, False), (2, 0.8, True), (5, 0.1, False), (5, 0.4, True)):
        u = beta * (d + 1)
        assert (u * (d + 1) * math.exp(u) < (math.exp(u) - 1) * (math.exp(u) + d)) is stable
        corners, weights = simplex(d)
        assert cluster_stability(corners, weights, beta=beta, tau=0.5).stable is stable
        cloud = tokens_of(corners, [20] * (d + 1))
        cloud = cloud + 1e-4 * torch.randn(cloud.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
        found = evolve(cloud, Ascent(tau=0.5, beta=beta), contraction="zca", steps=400, observe=["within"], every=400)
        first, last = found.observed["within"].tolist()
        assert last < 0.7 * first if stable else last > 2 * first, (d, beta, first, last)


def test_products_of_two_points_rest_and_are_unstable():
    """Attention acts on each coordinate of a product: 2^d corners of a cube are an equilibrium, too."""
    cube = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=F64)] * 3)
    weights = torch.full((8,), 1 / 8, dtype=F64)
    for beta in (0.3, 1.0, 2.0):
        found = cluster_stability(cube, weights, beta=beta, tau=0.5)
        assert float(found.residual) < 1e-12
        assert found.shape.shape == (12,)
        assert not found.stable
    close(step(cube, 0.5, 1.0), cube, 10.0)


def test_points_on_which_attention_is_not_affine_do_not_rest():
    generator = torch.Generator().manual_seed(3)
    cloud = torch.randn(4, 2, generator=generator, dtype=F64)
    cloud = evolve(cloud, Ascent(tau=0.0), contraction="zca", steps=1).cloud
    found = cluster_stability(cloud, torch.full((4,), 0.25, dtype=F64), beta=1.0, tau=0.5)
    assert float(found.residual) > 1e-3
    after = step(cloud, 0.5, 1.0)
    assert float((after @ after.mT - cloud @ cloud.mT).abs().max()) > 1e-3
