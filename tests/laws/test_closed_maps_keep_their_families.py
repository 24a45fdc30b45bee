"""The closure table: a map keeps the family of a measure if and only if it makes a tilt of that measure."""

import pytest
import torch

from gradlogz import Empirical, Gamma, Gaussian, InverseGaussian, OneHot, Poisson, Sphere, Spins, Wishart
from gradlogz.filters import (
    BetaBinomial,
    DirichletMultinomial,
    GammaExponential,
    GammaPoisson,
    InverseWishartNormal,
    LinearGaussian,
    LinearMotion,
    is_closed_under,
)
from gradlogz.measures import mean_to_natural, smat, svec
from support.scales import close

F64 = torch.float64


def number(x):
    return torch.tensor(x, dtype=F64)


def turn(angle):
    angle = number(angle)
    return torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))


SQUARE = number([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
S = number([[2.0, 0.7], [0.7, 1.0]])
ROOT = torch.linalg.cholesky(S)
SWAP = number([[0.0, 1.0], [1.0, 0.0]])
TILTED = number([[0.3, -1.0]])  # weights of the square that are a tilt of equal ones
ONE = number([1.0, 1.0])

MEASURES = [
    ("gaussian", Gaussian(number([0.5, -1.0]), S), [ROOT @ turn(0.7) @ ROOT.inverse()], [turn(0.7), 2 * S]),
    ("gamma", Gamma(number([2.0, 3.0]), number([1.0, 4.0])), [torch.diag(number([2.0, 0.5]))], [SWAP + turn(0.1)]),
    ("inverse gaussian", InverseGaussian(ONE, 2 * ONE), [torch.eye(2, dtype=F64)], [2 * torch.eye(2, dtype=F64)]),
    ("sphere", Sphere(2, torch.ones((), dtype=F64)), [turn(0.4), SWAP], [torch.diag(number([2.0, 1.0]))]),
    ("one hot", OneHot(number([0.2, 0.8]).log()), [SWAP], [turn(0.4)]),
    ("poisson", Poisson(number([1.0, 3.0])), [SWAP], [2 * torch.eye(2, dtype=F64)]),
    ("spins", Spins(number([0.3, -1.0])), [torch.diag(number([-1.0, 1.0])) @ SWAP], [turn(0.4)]),
    ("empirical", Empirical(SQUARE), [turn(torch.pi / 2)], [turn(0.4), 2 * torch.eye(2, dtype=F64)]),
    ("weighted", Empirical(SQUARE, (SQUARE @ TILTED.mT).squeeze(-1)), [turn(torch.pi / 2)], [turn(0.4)]),
    ("uneven", Empirical(SQUARE, number([1.0, 0.0, 1.0, 0.0])), [-torch.eye(2, dtype=F64)], [turn(torch.pi / 2)]),
]
KEPT = [pytest.param(h, W, id=f"{name} {i}") for name, h, good, _ in MEASURES for i, W in enumerate(good)]
LOST = [pytest.param(h, W, id=f"{name} {i}") for name, h, _, bad in MEASURES for i, W in enumerate(bad)]
DIRECTIONS = 0.1 * number([[1.0, 0.0], [0.3, -0.8], [-1.0, 0.5]])


def cumulants(h, eta, W=None):
    """log E exp<W x, s> under the tilt by eta, for some s, and its curvature at 0."""
    s = DIRECTIONS if W is None else DIRECTIONS @ W
    return h.log_normalizer(eta + s) - h.log_normalizer(eta.expand_as(s))


@pytest.mark.parametrize(("h", "W"), KEPT)
def test_maps_that_keep_a_family_make_a_tilt_of_the_same_measure(h, W):
    assert is_closed_under(h, LinearMotion(W)).closed
    eta = number([[-0.2, -0.3]])
    mean = h.mean(eta) @ W.mT
    found = mean_to_natural(h, mean)
    close(cumulants(h, found), cumulants(h, eta, W), 1.0, tolerance=1e-8)


@pytest.mark.parametrize(("h", "W"), LOST)
def test_maps_that_do_not_keep_a_family_make_none(h, W):
    answer = is_closed_under(h, LinearMotion(W))
    assert not answer.closed
    assert answer.why
    eta = number([[-0.2, -0.3]])
    mean = h.mean(eta) @ W.mT
    try:
        found = mean_to_natural(h, mean)
    except ValueError:
        return  # the moved mean lies outside of all that the family can reach
    if not bool(h.in_domain(found).all()) or not bool(found.isfinite().all()):
        return
    assert float((cumulants(h, found) - cumulants(h, eta, W)).abs().max()) > 1e-5


def test_wishart_matrices_keep_their_family_under_congruence():
    W, V = number([[1.0, 0.4], [-0.2, 1.5]]), S
    h = Wishart(number(5.0), V)
    assert is_closed_under(h, LinearMotion(W)).closed
    # S' = W S W^T is V tilted by T with V⁻¹ - 2T = (W V W^T)⁻¹.
    T = (V.inverse() - (W @ V @ W.mT).inverse()) / 2
    s = 0.05 * svec(number([[1.0, 0.2], [0.2, -0.5]]))
    moved = svec(W.mT @ smat(s) @ W)
    ours = h.log_normalizer((svec(T) + s).unsqueeze(0)) - h.log_normalizer(svec(T).unsqueeze(0))
    close(ours, h.log_normalizer(moved.unsqueeze(0)))
    assert not is_closed_under(h, LinearMotion(torch.zeros(2, 2, dtype=F64))).closed


def test_translations_and_noise_are_for_gaussians():
    eye, shift = torch.eye(2, dtype=F64), number([1.0, 2.0])
    for name, h, good, _ in MEASURES:
        assert is_closed_under(h, LinearMotion(good[0], noise=eye)).closed is False, name
        assert is_closed_under(h, LinearMotion(good[0], shift)).closed is (name == "gaussian"), name
    state = LinearGaussian(eye, eye)
    assert is_closed_under(state, LinearMotion(turn(0.3), shift, S)).closed
    assert is_closed_under(state, LinearMotion(torch.zeros(2, 2, dtype=F64), shift, S)).closed
    assert not is_closed_under(state, LinearMotion(torch.zeros(2, 2, dtype=F64), shift)).closed


def test_the_table_of_conjugate_families():
    half = torch.diag(number([0.5, 3.0]))
    flip = torch.diag(number([-1.0, 1.0]))
    for family in (GammaPoisson(channels=2), GammaExponential(channels=2)):
        assert is_closed_under(family, LinearMotion(half)).closed
        for motion in (
            LinearMotion(flip),
            LinearMotion(turn(0.2)),
            LinearMotion(half, ONE),
            LinearMotion(half, None, S),
        ):
            assert not is_closed_under(family, motion).closed
    assert is_closed_under(BetaBinomial(channels=2), LinearMotion(flip, number([1.0, 0.0]))).closed
    assert not is_closed_under(BetaBinomial(channels=2), LinearMotion(flip)).closed
    assert is_closed_under(DirichletMultinomial(2), LinearMotion(SWAP)).closed
    assert not is_closed_under(DirichletMultinomial(2), LinearMotion(half)).closed
    assert is_closed_under(InverseWishartNormal(2), LinearMotion(half)).closed
    assert not is_closed_under(InverseWishartNormal(2), LinearMotion(half, ONE)).closed


def test_points_without_weight_go_to_points_without_weight():
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    h = Empirical(points, torch.tensor([0.0, -torch.inf], dtype=torch.float64))
    eye = torch.eye(2, dtype=torch.float64)
    assert is_closed_under(h, LinearMotion(eye)).closed
    assert not is_closed_under(h, LinearMotion(-eye)).closed
