"""What a step does to the moments of a Gaussian cloud, and to modes of unequal directions.   [theory 4.4]"""

import math

import pytest
import torch
from numpy.polynomial import hermite_e

from gradlogz import Ascent, GaussianCloud, evolve
from gradlogz.dynamics import hermite_growth, sphere_growth
from gradlogz.dynamics.contraction import LayerNorm, SphereProjection
from support.scales import close

STATEMENTS = ("4.4 moments", "4.4 flow")

F64 = torch.float64
nodes, weights = (torch.tensor(t) for t in hermite_e.hermegauss(48))
weights = weights / weights.sum()


def eye(d):
    return torch.eye(d, dtype=F64)


# Moments --------------------------------------------------------------------------------------------------------------


def test_without_a_contraction_the_mean_outgrows_the_spread():
    """By (1 + tau + tau beta c) / (1 + tau beta c) in a step."""
    tau, beta, c = 0.5, 0.3, 1.7
    law = GaussianCloud(torch.tensor([0.4, -0.2], dtype=F64), c * eye(2))
    after = law.evolve(Ascent(tau=tau, beta=beta))
    close(after.mean, (1 + tau + tau * beta * c) * law.mean)
    close(after.covariance, (1 + tau * beta * c) ** 2 * law.covariance)


def test_layer_norm_is_a_sphere_in_the_subspace_of_sum_zero():
    d = 4
    Q = torch.linalg.svd(eye(d) - 1 / d).U[:, : d - 1]
    m, A = torch.tensor([0.3, -0.5, 0.2, 0.9], dtype=F64), torch.randn(d, d, dtype=F64)
    C = A @ A.mT
    mean, covariance = LayerNorm().moments(m, C)
    inner, outer = SphereProjection(math.sqrt(d)).moments(Q.mT @ m, Q.mT @ C @ Q)
    close(mean, Q @ inner, scale=10.0)
    close(covariance, Q @ outer @ Q.mT, scale=10.0)


def test_in_many_dimensions_a_norm_of_tokens_is_one_number():
    """m ~ r m' / sqrt(tr C' + |m'|²), C ~ r² C' / (tr C' + |m'|²)."""
    d = 400
    m = torch.linspace(-0.1, 0.3, d, dtype=F64)
    C = torch.diag(torch.linspace(0.5, 1.5, d, dtype=F64))
    mean, covariance = SphereProjection().moments(m, C)
    size = float(C.trace() + m @ m)
    assert float((mean - m * math.sqrt(d / size)).norm() / mean.norm()) < 5e-3
    assert float((covariance - C * d / size).norm() / covariance.norm()) < 1e-2


def test_under_one_number_the_ratio_of_two_variances_grows_as_the_square():
    tau, beta = 0.5, 0.3
    law = GaussianCloud(torch.zeros(2, dtype=F64), torch.diag(torch.tensor([1.4, 0.6], dtype=F64)))
    after = law.evolve(Ascent(tau=tau, beta=beta), contraction="scalar").covariance.diagonal()
    expected = 1.4 / 0.6 * ((1 + tau * beta * 1.4) / (1 + tau * beta * 0.6)) ** 2
    assert float(after[0] / after[1]) == pytest.approx(expected, rel=1e-12)


def test_the_closure_under_a_norm_of_tokens_is_a_few_per_cent_fast():
    """d = 32 and 2000 tokens: the part of the mean, after 4 and 8 steps; self weights are what it leaves out."""
    ascent = Ascent(tau=0.5, beta=0.1)
    law = GaussianCloud(torch.full((32,), 0.1, dtype=F64), eye(32))
    cloud = law.sample(2000, generator=torch.Generator().manual_seed(0)).float()
    found = evolve(cloud, ascent, contraction="rms_norm", steps=8, observe=["mean_fraction"], every=4)
    for steps, measured in ((4, found.observed["mean_fraction"][1]), (8, found.observed["mean_fraction"][2])):
        end = law.evolve(ascent, contraction="rms_norm", steps=steps)
        fraction = float(end.mean @ end.mean / (end.mean @ end.mean + end.covariance.trace()))
        assert 0.9 * fraction < float(measured) < 1.02 * fraction


def test_under_batch_norm_correlations_grow_to_one():
    """R' = corr(R (I + tau beta R)²); at R = I by 1 + 2 s beta with s = tau / (1 + tau beta); |R| = 1 attracts."""
    tau, beta, eps = 0.5, 0.4, 1e-6
    R = torch.tensor([[1.0, eps], [eps, 1.0]], dtype=F64)
    ascent = Ascent(tau=tau, beta=beta)
    after = GaussianCloud(torch.zeros(2, dtype=F64), R).evolve(ascent, contraction="batch_norm").covariance
    step = eye(2) + tau * beta * R
    raw = step @ R @ step
    close(after, raw / (raw.diagonal().unsqueeze(-1) * raw.diagonal()).sqrt())
    assert float(after[0, 1]) / eps == pytest.approx(1 + 2 * beta * tau / (1 + tau * beta), abs=1e-6)
    for start in (0.01, -0.01):
        law = GaussianCloud(torch.zeros(2, dtype=F64), torch.tensor([[1.0, start], [start, 1.0]], dtype=F64))
        end = law.evolve(ascent, contraction="batch_norm", steps=60).covariance
        assert float(end[0, 1]) == pytest.approx(math.copysign(1.0, start), abs=1e-6)


# Modes ----------------------------------------------------------------------------------------------------------------


def hermite(n, z):
    before, now = torch.ones_like(z), z
    for k in range(1, n):
        before, now = now, z * now - k * before
    return now if n else before


@pytest.mark.parametrize("alpha", [(1, 1), (1, 2), (2, 1), (0, 3), (3, 1)])
@pytest.mark.parametrize("tau", [0.5, -0.3])
def test_the_factor_of_a_mode_of_two_directions(alpha, tau):
    """Two variances; the derivative in eps of the coefficient after a step, by quadrature over the plane.

    Centring and recolouring change it by what they change lower orders, which is nothing to first order.
    """
    c, beta = torch.tensor([0.5, 1.5], dtype=F64), 0.3
    z = torch.cartesian_prod(nodes, nodes)
    p0 = (weights.unsqueeze(-1) * weights).reshape(-1)
    x = z * c.sqrt()
    logits = beta * x @ x.mT

    def coefficient(eps):
        p = p0 * (1 + eps * hermite(alpha[0], z[:, 0]) * hermite(alpha[1], z[:, 1]))
        w = p * (logits - logits.amax(-1, keepdim=True)).exp()
        y = (x + tau * (w @ x) / w.sum(-1, keepdim=True)) / (c.sqrt() * (1 + tau * beta * c))
        mode = hermite(alpha[0], y[:, 0]) * hermite(alpha[1], y[:, 1])
        return (p * mode).sum() / (math.factorial(alpha[0]) * math.factorial(alpha[1]))

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    _, actual = torch.func.jvp(coefficient, (zero,), (one,))
    assert float(actual) == pytest.approx(hermite_growth(alpha, variance=c, beta=beta, tau=tau), abs=1e-8)


@pytest.mark.parametrize("beta", [0.6, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_in_the_setting_of_theorem_1_the_growth_is_linear_in_the_order_at_beta_one(n, beta):
    """Keys Sigma eta, eta ~ N(0, Sigma^-1): 1 + beta^(n-1) n tau sigma / (1 + tau beta sigma)."""
    sigma, tau = 0.7, 0.4
    eta = nodes / math.sqrt(sigma)
    logits = beta * eta.unsqueeze(-1) * (sigma * eta)

    def coefficient(eps):
        p = weights * (1 + eps * hermite(n, nodes))
        w = p * (logits - logits.amax(-1, keepdim=True)).exp()
        y = eta + tau * (w @ (sigma * eta)) / w.sum(-1)
        return (p * hermite(n, y * math.sqrt(sigma) / (1 + tau * beta * sigma))).sum() / math.factorial(n)

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    _, actual = torch.func.jvp(coefficient, (zero,), (one,))
    assert float(actual) == pytest.approx(1 + beta ** (n - 1) * n * tau * sigma / (1 + tau * beta * sigma), abs=1e-6)


def test_descent_attracts_every_order():
    """1 + tau beta c > 0 and n |s| (beta c)^(n-1) < 2: all factors are inside (-1, 1), and tend to 1 with the order."""
    factors = [hermite_growth(n, variance=1.0, beta=0.5, tau=-0.5) for n in range(1, 40)]
    assert all(-1 < factor < 1 for factor in factors)
    assert factors[-1] > 1 - 1e-9


def test_a_warm_sphere_of_many_dimensions_grows_as_the_gaussian():
    """Degrees 1 and 2 against orders 1 and 2, variance r² / d.   [theory 4.5]"""
    d, tau, radius = 4000, 0.5, 2.0
    for beta in (1e-3, 10.0):
        for order in (1, 2):
            sphere = sphere_growth(order, dim=d, beta=beta, tau=tau, radius=radius) - 1
            gaussian = hermite_growth(order, variance=radius**2 / d, beta=beta, tau=tau) - 1
            assert sphere == pytest.approx(gaussian, rel=2e-3)
