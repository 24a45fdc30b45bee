"""GaussianCloud says what evolve does to many tokens, and its closed forms are those of the integrals."""

import math

import pytest
import torch

from gradlogz import Ascent, GaussianCloud, evolve
from gradlogz.dynamics.contraction import moments_of, projected_moments
from support.scales import close

F64 = torch.float64
CONTRACTIONS = [
    "none", "center", "scalar", "batch_norm", "zca", "pca", "cholesky", "monge", "sphere", "rms_norm", "layer_norm",
    "resolvent", ("center", "rms_norm"),
]  # fmt: skip


def cloud(d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(d, d, generator=generator, dtype=F64)
    return GaussianCloud(0.5 * torch.randn(d, generator=generator, dtype=F64), A @ A.mT / d + 0.3 * torch.eye(d))


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=str)
def test_one_step_of_many_tokens(contraction):
    """20 000 tokens that attend to each other: the moments agree to sampling error."""
    law = cloud()
    B = torch.tensor([[0.8, 0.3, 0.0], [-0.2, 1.0, 0.1], [0.0, 0.4, 0.6]], dtype=F64)
    W = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.9, 0.0], [0.0, -0.3, 1.0]], dtype=F64)
    ascent = Ascent(tau=0.5, beta=0.4, B=B, W_v=W)
    expected = law.evolve(ascent, contraction=contraction)
    tokens = law.sample(20_000, generator=torch.Generator().manual_seed(1)).float()
    single = Ascent(tau=0.5, beta=0.4, B=B.float(), W_v=W.float())
    found = evolve(tokens, single, contraction=contraction, steps=1).cloud.double()
    mean, covariance = moments_of(found)
    size = float(expected.covariance.diagonal().sum().sqrt()) + float(expected.mean.norm())
    torch.testing.assert_close(mean, expected.mean, rtol=0, atol=0.03 * size)
    torch.testing.assert_close(covariance, expected.covariance, rtol=0, atol=0.04 * size**2)


def test_projected_moments_in_one_dimension_are_signs():
    for m, c in ((0.3, 2.0), (-1.5, 0.2), (0.0, 1.0)):
        first, second = projected_moments(torch.tensor([m], dtype=F64), torch.tensor([[c]], dtype=F64))
        close(first, torch.tensor([math.erf(m / math.sqrt(2 * c))], dtype=F64))
        close(second, torch.ones(1, 1, dtype=F64))


@pytest.mark.parametrize("d", [2, 5, 40])
def test_projected_moments_of_a_round_cloud(d):
    zero, eye = torch.zeros(d, dtype=F64), torch.eye(d, dtype=F64)
    first, second = projected_moments(zero, 3.0 * eye)
    close(first, zero)
    close(second, eye / d)


def test_projected_moments_against_samples():
    law = cloud(4, seed=2)
    y = law.sample(1_000_000, generator=torch.Generator().manual_seed(3))
    u = y / y.norm(dim=-1, keepdim=True)
    first, second = projected_moments(*law)
    torch.testing.assert_close(first, u.mean(0), rtol=0, atol=3e-3)
    torch.testing.assert_close(second, u.mT @ u / len(u), rtol=0, atol=3e-3)
    close(second.diagonal().sum(), torch.ones((), dtype=F64))


def test_projected_moments_of_a_flat_cloud():
    """A singular covariance is that of a cloud in a subspace."""
    flat = cloud(2, seed=4)
    C = torch.zeros(3, 3, dtype=F64)
    C[:2, :2] = flat.covariance
    m = torch.cat((flat.mean, torch.zeros(1, dtype=F64)))
    first, second = projected_moments(m, C)
    inner, outer = projected_moments(*flat)
    close(first, torch.cat((inner, torch.zeros(1, dtype=F64))))
    close(second[:2, :2], outer)


def test_the_precision_falls_linearly():
    """C(t)^-1 = C(0)^-1 - 2 beta t, as the limit of small steps."""
    law, beta = GaussianCloud(torch.zeros(3, dtype=F64), cloud().covariance), 0.7
    time = 0.6 * float(law.blow_up_time(beta=beta))
    expected = law.flow(time, beta=beta)
    close(
        torch.linalg.inv(expected),
        torch.linalg.inv(law.covariance) - 2 * beta * time * torch.eye(3, dtype=F64),
        scale=100.0,
    )
    coarse, fine = (law.evolve(Ascent(tau=time / k, beta=beta), steps=k).covariance for k in (2000, 4000))
    torch.testing.assert_close(2 * fine - coarse, expected, rtol=1e-5, atol=1e-6)


def test_the_precision_of_three_thousand_tokens():
    law, beta = GaussianCloud(torch.zeros(2, dtype=F64), torch.diag(torch.tensor([1.0, 0.5], dtype=F64))), 0.3
    tokens = law.sample(3000, generator=torch.Generator().manual_seed(0))
    mean, _ = moments_of(tokens)
    time = 0.3 * float(law.blow_up_time(beta=beta))
    start = GaussianCloud(mean * 0, moments_of(tokens - mean)[1])
    found = evolve(tokens - mean, Ascent(tau=time / 30, beta=beta), contraction="center", steps=30).cloud
    torch.testing.assert_close(moments_of(found)[1], start.flow(time, beta=beta), rtol=0.05, atol=0.02)


def test_the_mean_outgrows_the_spread():
    """Under a norm of tokens the mean direction wins: one cluster.   [theory 4.4]"""
    law = GaussianCloud(torch.tensor([0.2, 0.0, 0.0, 0.0], dtype=F64), torch.eye(4, dtype=F64))
    end = law.evolve(Ascent(tau=0.5, beta=0.2), contraction="rms_norm", steps=40)
    assert float(end.mean.square().sum() / 4) > 0.999


def test_a_centred_cloud_becomes_a_line():
    law = GaussianCloud(torch.zeros(4, dtype=F64), torch.diag(torch.tensor([1.2, 1.0, 0.9, 0.8], dtype=F64)))
    end = law.evolve(Ascent(tau=0.5, beta=0.2), contraction="scalar", steps=200)
    assert float(end.covariance[0, 0]) == pytest.approx(4.0, rel=1e-6)
