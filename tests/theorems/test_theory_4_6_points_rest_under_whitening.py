"""Laws on d + 1 points in general position rest under whitening, and two points attract.   [theory 4.6]

a step takes d + 1 such points to others by an affine map, and whitening undoes it up to a rotation
a departure inside the clusters of the symmetric law on two points is multiplied by
(1 + tau beta sech² beta) / (1 + tau tanh beta) < 1,   since beta < sinh beta cosh beta
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Ascent, evolve
from support.scales import close

THEORY = ("4.6",)

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
def test_one_point_more_than_dimensions_rests_up_to_a_rotation(seed, d, tau, beta):
    """The simplex of equal weights, turned and with one corner three times: its inner products stay."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randn(d + 1, d, generator=generator, dtype=F64)
    cloud = evolve(torch.cat((corners, corners[:1], corners[:1])), Ascent(tau=0.0), contraction="zca", steps=1).cloud
    after = step(cloud, tau, beta)
    close(after @ after.mT, cloud @ cloud.mT, scale=1e4)


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
