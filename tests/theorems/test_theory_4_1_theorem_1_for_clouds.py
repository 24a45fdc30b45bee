"""Which contractions make Theorem 1 true, tokens attending to a frozen Gaussian.   [theory 4.1, 4.3]

With keys N(mu, Sigma) and natural parameters of mean Sigma^-1 mu and covariance Sigma^-1 a step is affine; a
contraction that restores these two moments restores the law, and some restore every token, Gaussian or not.
"""

import pytest
import torch

from gradlogz import Gaussian
from gradlogz.dynamics.contraction import BatchNorm, Resolvent, Scalar, Whitening, moments_of
from support.scales import close

TAU, D = 0.7, 3


def setting(kind="full"):
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(D, generator=generator, dtype=torch.float64)
    A = torch.randn(D, D, generator=generator, dtype=torch.float64)
    Sigma = {
        "full": A @ A.mT + torch.eye(D, dtype=torch.float64),
        "diagonal": torch.diag(torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)),
        "scalar": 1.7 * torch.eye(D, dtype=torch.float64),
    }[kind]
    C = torch.linalg.inv(Sigma)
    m = C @ mu
    # No Gaussian: exponential tokens with exactly these moments.
    raw = torch.empty(200, D, dtype=torch.float64).exponential_(generator=generator)
    eta = Whitening("zca", m, C)(raw)
    return mu, Sigma, m, C, eta


def step(mu, Sigma, eta):
    return eta + TAU * Gaussian(mu, Sigma).mean(eta)


def test_the_tokens_have_the_moments_of_the_theorem():
    _, _, m, C, eta = setting()
    mean, covariance = moments_of(eta)
    close(mean, m)
    close(covariance, C)


@pytest.mark.parametrize("kind", ["zca", "monge"])
def test_recolouring_is_the_identity_on_every_token(kind):
    mu, Sigma, m, C, eta = setting()
    close(Whitening(kind, m, C)(step(mu, Sigma, eta)), eta, scale=10.0)


@pytest.mark.parametrize("kind", ["pca", "cholesky"])
def test_other_roots_restore_the_moments_and_turn_the_tokens(kind):
    mu, Sigma, m, C, eta = setting()
    found = Whitening(kind, m, C)(step(mu, Sigma, eta))
    mean, covariance = moments_of(found)
    close(mean, m, scale=10.0)
    close(covariance, C, scale=10.0)
    assert float((found - eta).norm()) > 1e-3 * float(eta.norm())


def test_a_resolvent_of_the_covariance_undoes_the_step():
    mu, Sigma, _, _, eta = setting()
    eye = torch.eye(D, dtype=torch.float64)
    close(torch.linalg.solve(eye + TAU * Sigma, (step(mu, Sigma, eta) - TAU * mu).mT).mT, eta, scale=10.0)


def test_a_number_undoes_it_for_the_identity():
    _, _, _, _, eta = setting()
    eye, zero = torch.eye(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    close(Resolvent(TAU)(step(zero, eye, eta)), eta)


def recoloured(contraction, m, C, y):
    """A contraction to mean 0 and unit variances, taken to the moments of the theorem."""
    return m + contraction(y) @ torch.diag(C.diagonal().sqrt())


@pytest.mark.parametrize(("kind", "holds"), [("diagonal", True), ("full", False)])
def test_batch_norm_serves_if_the_covariance_is_diagonal(kind, holds):
    mu, Sigma, m, C, eta = setting(kind)
    found = recoloured(BatchNorm(), m, C, step(mu, Sigma, eta))
    if holds:
        close(found, eta, scale=10.0)
    else:
        assert float((moments_of(found)[1] - C).norm()) > 0.01


@pytest.mark.parametrize(("kind", "holds"), [("scalar", True), ("diagonal", False)])
def test_one_number_serves_if_the_covariance_is_one(kind, holds):
    mu, Sigma, m, C, eta = setting(kind)
    found = recoloured(Scalar(), m, C, step(mu, Sigma, eta))
    if holds:
        close(found, eta, scale=10.0)
    else:
        assert float((moments_of(found)[1] - C).norm()) > 0.01


def test_where_key_covariance_and_target_do_not_commute_the_cloud_turns():
    """The composite is C*^(1/2) U C*^(-1/2) with the polar factor U of (I + tau M) C*^(1/2), not the identity."""
    _, M, _, _, _ = setting()
    generator = torch.Generator().manual_seed(5)
    A = torch.randn(D, D, generator=generator, dtype=torch.float64)
    C = A @ A.mT + torch.eye(D, dtype=torch.float64)
    zero = torch.zeros(D, dtype=torch.float64)
    eta = Whitening("zca", zero, C)(torch.randn(300, D, generator=generator, dtype=torch.float64))
    found = Whitening("zca", zero, C)(step(zero, M, eta))
    c, V = torch.linalg.eigh(C)
    root, inverse = (V * c.sqrt()) @ V.mT, (V * c.rsqrt()) @ V.mT
    left, _, right = torch.linalg.svd((torch.eye(D, dtype=torch.float64) + TAU * M) @ root)
    close(found, eta @ (root @ left @ right @ inverse).mT, scale=100.0)
    assert float((found - eta).abs().max()) > 1e-3
