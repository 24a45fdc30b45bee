"""The Gibbs chain of two measures, its stationary law, and the mean-field alternation below it.   [theory 8.5]"""

import pytest
import torch

from gradlogz import Empirical, Gaussian
from gradlogz.measures import Gibbs
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def finite(seed=0):
    return Gibbs(Empirical(drawn(seed, 7, 3), drawn(seed + 1, 7)), Empirical(drawn(seed + 2, 5, 3), drawn(seed + 3, 5)))


def test_the_stationary_law_weighs_queries_by_their_normalisers():
    pair = finite()
    T, pi = pair.transition(), pair.stationary()
    expected = torch.stack(
        [
            torch.exp(pair.g.log_weights[i])
            * sum(torch.exp(w + pair.g.points[i] @ x) for w, x in zip(pair.h.log_weights, pair.h.points, strict=True))
            for i in range(5)
        ]
    )
    close(pi, expected / expected.sum())
    close(T.sum(-1), torch.ones(5, dtype=F64))
    close(pi @ T, pi)
    flow = pi.unsqueeze(-1) * T
    close(flow, flow.mT)  # detailed balance


def test_a_chain_visits_queries_as_often():
    pair = finite(4)
    start = pair.g.points[:1].expand(4000, 3)
    found = pair.chain(start, 60, generator=torch.Generator().manual_seed(0)).eta[40:].reshape(-1, 3)
    visits = (torch.cdist(found, pair.g.points) < 1e-9).double().mean(0)
    # 4000 independent chains: a standard error of 0.008 at most.
    torch.testing.assert_close(visits, pair.stationary(), rtol=0, atol=0.024)


def gaussians(size):
    A = drawn(1, 2, 2)
    Sigma = A @ A.mT + 0.5 * torch.eye(2, dtype=F64)
    B = drawn(2, 2, 2)
    B = B @ B.mT + 0.2 * torch.eye(2, dtype=F64)
    B = size * B / torch.linalg.eigvals(B @ Sigma).abs().max()
    return Gaussian(drawn(3, 2), Sigma), Gaussian(drawn(4, 2), B)


def test_gaussians_have_a_joint_law_below_one():
    """Stationary precision of eta: B^-1 - Sigma; its mean (I - B Sigma)^-1 (a + B mu)."""
    h, g = gaussians(0.5)
    pair = Gibbs(h, g)
    Sigma, B, mu, a = h.covariance(h.loc), g.covariance(g.loc), h.loc, g.loc
    start = torch.zeros(20_000, 2, dtype=F64)
    found = pair.chain(start, 40, generator=torch.Generator().manual_seed(1)).eta[-1]
    covariance = torch.linalg.inv(torch.linalg.inv(B) - Sigma)
    mean = torch.linalg.solve(torch.eye(2, dtype=F64) - B @ Sigma, a + B @ mu)
    size = float(covariance.diagonal().max())
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=0.05 * size**0.5)
    torch.testing.assert_close(found.mT.cov(), covariance, rtol=0, atol=0.05 * size)


@pytest.mark.parametrize("size", [1.0, 1.3])
def test_at_the_covariance_of_theorem_1_there_is_none(size):
    h, g = gaussians(size)
    with pytest.raises(ValueError, match=r"rho\(B Sigma\) < 1"):
        Gibbs(h, g)
    mu, Sigma = h.loc, h.covariance(h.loc)
    inverse = torch.linalg.inv(Sigma)
    with pytest.raises(ValueError, match=r"rho\(B Sigma\) < 1"):
        Gibbs(h, Gaussian(inverse @ mu, (inverse + inverse.mT) / 2))


def test_the_mass_of_gaussians():
    """det(I - B Sigma)^(-1/2) around 0, and against quadrature in one dimension."""
    zero = torch.zeros(2, dtype=F64)
    h, g = gaussians(0.6)
    centred = Gibbs(Gaussian(zero, h.covariance(zero)), Gaussian(zero, g.covariance(zero)))
    eye = torch.eye(2, dtype=F64)
    close(centred.log_mass(), -torch.linalg.slogdet(eye - g.covariance(zero) @ h.covariance(zero)).logabsdet / 2)
    mu, s, a, b = 0.4, 0.7, -0.3, 0.9
    one = Gibbs(*(Gaussian(torch.tensor([m], dtype=F64), torch.tensor([[c]], dtype=F64)) for m, c in ((mu, s), (a, b))))
    eta = torch.linspace(-40, 40, 200_001, dtype=F64)
    density = torch.exp(-((eta - a) ** 2) / (2 * b)) / (2 * torch.pi * b) ** 0.5
    mass = torch.trapezoid(density * torch.exp(mu * eta + s * eta**2 / 2), eta)
    close(one.log_mass(), mass.log(), tolerance=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_means_in_place_of_draws_ascend_a_bound(seed):
    pair = finite(10 * seed)
    found = pair.mean_field(drawn(seed, 6, 3), steps=30)
    assert bool((found.bound.diff(dim=0) >= -1e-12).all())
    assert bool((found.bound <= pair.log_mass() + 1e-12).all())
    close(found.eta, pair.g.mean(pair.h.mean(found.eta)), tolerance=1e-3)
