"""Harmonics of tokens on the sphere grow by the factor of theory.   [theory 4.5]"""

import math

import pytest
import scipy.special
import torch

from gradlogz import Ascent, evolve
from gradlogz.dynamics import fastest_degree, harmonic_mode, sphere_growth
from support.scales import close

STATEMENTS = ("4.5 growth",)

F64 = torch.float64


def directions(*shape):
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64), dim=-1
    )


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_on_the_sphere_a_mode_is_the_length_of_its_coefficients(degree):
    """4 pi / (2 l + 1) sum_m |E Y_lm|², the harmonics of scipy."""
    u = directions(200, 3)
    polar, around = torch.acos(u[:, 2]).numpy(), torch.atan2(u[:, 1], u[:, 0]).numpy()
    power = sum(abs(scipy.special.sph_harm_y(degree, m, polar, around).mean()) ** 2 for m in range(-degree, degree + 1))
    expected = torch.tensor(math.sqrt(4 * math.pi / (2 * degree + 1) * power), dtype=F64)
    close(harmonic_mode(3.0 * u, degree), expected, scale=10.0)


@pytest.mark.parametrize("d", [3, 5])
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_in_more_dimensions_it_is_a_mean_of_gegenbauer_polynomials(degree, d):
    u = directions(2, 60, d)
    P = scipy.special.eval_gegenbauer(degree, d / 2 - 1, (u @ u.mT).numpy())
    expected = torch.tensor(P / scipy.special.eval_gegenbauer(degree, d / 2 - 1, 1.0)).mean((-2, -1)).sqrt()
    close(harmonic_mode(u, degree), expected, scale=10.0)


@pytest.mark.parametrize(("beta", "tau"), [(5.0, 0.5), (20.0, 1.0), (5.0, -0.3)])
@pytest.mark.parametrize("degree", [1, 3, 6])
def test_tokens_on_the_circle_grow_as_the_law_does(degree, beta, tau):
    """Tokens at the quantiles of (1 + eps cos l angle) / 2 pi, by Newton's method on the distribution function."""
    eps, even = 1e-4, 2 * math.pi * (torch.arange(600, dtype=F64) + 0.5) / 600
    angle = even.clone()
    for _ in range(20):
        angle = angle - (angle + eps / degree * (degree * angle).sin() - even) / (1 + eps * (degree * angle).cos())
    cloud = torch.stack((angle.cos(), angle.sin()), -1)
    close(harmonic_mode(cloud, degree), torch.tensor(eps / 2, dtype=F64), tolerance=1e-9)
    after = evolve(cloud, Ascent(tau=tau, beta=beta), contraction="sphere", steps=1).cloud
    measured = float(harmonic_mode(after, degree) / harmonic_mode(cloud, degree))
    assert measured == pytest.approx(sphere_growth(degree, dim=2, beta=beta, tau=tau), abs=1e-5)


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("beta", [0.5, 5.0, 80.0, 500.0])
def test_the_fastest_degree_is_the_greatest_of_all(dim, beta):
    factors = [sphere_growth(degree, dim=dim, beta=beta, tau=0.5) for degree in range(1, 80)]
    assert fastest_degree(dim=dim, beta=beta) == factors.index(max(factors)) + 1
    assert fastest_degree(dim=dim, beta=beta / 4, radius=2.0) == fastest_degree(dim=dim, beta=beta)
    if beta < 1:
        assert fastest_degree(dim=dim, beta=beta) == 1
    if beta > 50 * dim:
        assert fastest_degree(dim=dim, beta=beta) == pytest.approx(math.sqrt(2 * beta), rel=0.1)


def test_a_cloud_starts_with_about_so_many_clusters():
    angle = 2 * math.pi * torch.rand(8, 400, generator=torch.Generator().manual_seed(0), dtype=F64)
    cloud = torch.stack((angle.cos(), angle.sin()), -1)
    for beta in (20.0, 80.0):
        found = evolve(
            cloud, Ascent(tau=0.5, beta=beta), contraction="sphere", steps=40, observe=["clusters"], every=40
        )
        assert float(found.observed["clusters"][-1].double().mean()) == pytest.approx(
            fastest_degree(dim=2, beta=beta), rel=0.25
        )
