"""A harmonic of degree l grows by 1 + tau/(1 + tau a) I_{l+D/2-1}/I_{D/2-1} l (l+D-2)/beta.   [theory 4.5]

The uniform law itself is an equilibrium of every token. Both on the circle and on the sphere, by quadrature.
"""

import math

import numpy
import pytest
import torch

from gradlogz import Ascent, evolve
from gradlogz.dynamics import sphere_growth

STATEMENTS = ("4.5", "4.5 growth")

F64 = torch.float64


def moved(points, weights, beta, tau):
    logits = beta * points @ points.mT
    w = weights * (logits - logits.amax(-1, keepdim=True)).exp()
    y = points + tau * (w @ points) / w.sum(-1, keepdim=True)
    return y / y.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 0.5), (5.0, 0.5), (20.0, 2.0), (3.0, -0.2)])
@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_on_the_circle(degree, beta, tau):
    angle = 2 * math.pi * torch.arange(400, dtype=F64) / 400
    points = torch.stack((angle.cos(), angle.sin()), -1)

    def coefficient(eps):
        p = (1 + eps * (degree * angle).cos()) / 400
        y = moved(points, p, beta, tau)
        after = torch.atan2(y[:, 1], y[:, 0])
        return 2 * (p * (degree * after).cos()).sum()

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    _, actual = torch.func.jvp(coefficient, (zero,), (one,))
    assert float(actual) == pytest.approx(sphere_growth(degree, dim=2, beta=beta, tau=tau), abs=1e-8)


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 0.5), (6.0, 1.0)])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_on_the_sphere(degree, beta, tau):
    """Zonal harmonics: nodes of Gauss and Legendre in the height, equal ones around the axis."""
    height, mass = (torch.tensor(t) for t in numpy.polynomial.legendre.leggauss(40))
    around = 2 * math.pi * torch.arange(64, dtype=F64) / 64
    side = (1 - height.square()).sqrt()
    points = torch.stack(
        (
            side[:, None] * around.cos(),
            side[:, None] * around.sin(),
            height[:, None].expand(-1, 64),
        ),
        -1,
    ).reshape(-1, 3)
    p0 = (mass[:, None].expand(-1, 64) / (2 * 64)).reshape(-1)

    def legendre(z):
        before, now = torch.ones_like(z), z
        for k in range(1, degree):
            before, now = now, ((2 * k + 1) * z * now - k * before) / (k + 1)
        return now

    def coefficient(eps):
        p = p0 * (1 + eps * legendre(points[:, 2]))
        return (2 * degree + 1) * (p * legendre(moved(points, p, beta, tau)[:, 2])).sum()

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    _, actual = torch.func.jvp(coefficient, (zero,), (one,))
    assert float(actual) == pytest.approx(sphere_growth(degree, dim=3, beta=beta, tau=tau), abs=1e-8)


def test_the_uniform_circle_stays():
    angle = 2 * math.pi * torch.arange(300, dtype=F64) / 300
    points = torch.stack((angle.cos(), angle.sin()), -1)
    found = evolve(points, Ascent(tau=0.5, beta=2.0), contraction="sphere", steps=1).cloud
    torch.testing.assert_close(found, points, rtol=0, atol=1e-13)


def test_the_fastest_mode():
    """1, 3, 6, 13 and 25 at beta 1, 5, 20, 80 and 320 on the circle, near sqrt(2 beta)."""
    for beta, fastest in ((1.0, 1), (5.0, 3), (20.0, 6), (80.0, 13), (320.0, 25)):
        factors = [sphere_growth(degree, dim=2, beta=beta, tau=0.5) for degree in range(1, 60)]
        assert factors.index(max(factors)) + 1 == fastest
        assert min(factors) >= 1.0
