"""Extreme but legal values stay exact: huge logits, tiny weights, far or masked or many points, many dimensions.

The oracle sums in extended precision after an exact shift of the points. A row without mass has G = -inf and mean,
covariance, entropy, relative entropy, divergence and all gradients 0, never NaN.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

import gradlogz as gz
from gradlogz import Empirical
from support.measure_registry import Source
from support.scales import close

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


class Oracle(NamedTuple):
    """Statistics [m, ...] of an empirical measure, and its largest logit, relative to its first point."""

    log_normalizer: torch.Tensor
    probabilities: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor
    entropy: torch.Tensor
    largest: float


def oracle(points, eta, log_weights=None):
    x, e = (t.numpy().astype(np.longdouble) for t in (points, eta))
    x0, x = x[0], x - x[0]
    s = e @ x.T + (0 if log_weights is None else log_weights.numpy().astype(np.longdouble))
    peak = s.max(-1, keepdims=True)
    total = np.exp(s - peak).sum(-1, keepdims=True)
    p = np.exp(s - peak) / total
    mean = p @ x
    covariance = np.stack([(q[:, None] * (x - u)).T @ (x - u) for q, u in zip(p, mean, strict=True)])
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    G = (np.log(total) + peak).squeeze(-1) + e @ x0
    statistics = (G, p, mean + x0, covariance, entropy)
    return Oracle(
        *(torch.tensor(t.astype(np.float64), dtype=points.dtype) for t in statistics),
        float(np.abs(s[np.isfinite(s)]).max()),
    )


def agrees(h, eta, truth, spread):
    """Every statistic of h at eta; spread is the largest |x - x0|, which offsets do not enter."""
    logit, size = 1 + truth.largest, float(truth.mean.abs().max())
    offset = 1 + float(truth.log_normalizer.abs().max())
    close(h.log_normalizer(eta), truth.log_normalizer, logit + offset)
    close(h.probabilities(eta), truth.probabilities, logit)
    close(h.mean(eta), truth.mean, logit * spread + size)
    close(h.covariance(eta), truth.covariance, logit * spread**2)
    close(h.entropy(eta), truth.entropy, logit)
    assert bool((h.covariance(eta).diagonal(dim1=-2, dim2=-1) >= 0).all())
    assert bool((h.entropy(eta) >= 0).all())


@DTYPES
def test_logits_of_ten_thousand(dtype):
    s = Source(0, dtype)
    points, eta = s.normal(9, 3), s.normal(4, 3)
    eta = eta * (1e4 / (eta @ points.mT).abs().amax(-1, keepdim=True))
    agrees(Empirical(points), eta, oracle(points, eta), float(points.abs().max()) * 4)


@DTYPES
def test_logits_of_ten_thousand_are_exact_to_the_last_digit_where_the_answer_is_a_number(dtype):
    h, eta = Empirical(torch.tensor([[1.0], [-1.0]], dtype=dtype)), torch.tensor([[1e4], [-1e4]], dtype=dtype)
    assert h.log_normalizer(eta).tolist() == [1e4, 1e4]
    assert h.mean(eta).tolist() == [[1.0], [-1.0]]
    assert not bool(h.covariance(eta).any())
    assert not bool(h.entropy(eta).any())
    assert h.probabilities(eta).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@DTYPES
def test_biases_of_ten_thousand(dtype):
    s = Source(1, dtype)
    points, eta, log_weights = s.normal(9, 3), s.normal(4, 3), 1e4 * s.normal(4, 9).sign()
    truth = oracle(points, eta, log_weights)
    agrees(Empirical(points, log_weights), eta, truth, float(points.abs().max()) * 4)


def test_weights_of_1e_minus_300_and_of_0():
    s = Source(2)
    points, eta = s.normal(6, 3), s.normal(4, 3)
    for w in ([1e-300, 0, 1, 2, 0, 1e-300], [1e-300] * 6, [0, 0, 1e-300, 0, 0, 0]):
        weights = torch.tensor(w, dtype=torch.float64)
        truth = oracle(points, eta, weights.log())
        agrees(Empirical.weighted(points, weights), eta, truth, float(points.abs().max()) * 4)


def test_gradients_in_weights_of_1e_minus_300_are_exact_and_those_in_0_are_no_nan():
    s = Source(3)
    points, eta = s.normal(4, 3), s.normal(3)
    weights = torch.tensor([1e-300, 0, 1, 2], dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(Empirical.weighted(points, weights).log_normalizer(eta), weights)[0]
    mass = (points @ eta).exp()  # dG/dw = exp<x, eta> / Z
    exact = mass / (mass[2] + 2 * mass[3])
    close(gradient[[0, 2, 3]], exact[[0, 2, 3]], 10.0)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_points_far_away_lose_no_digits_of_their_differences(offset):
    s = Source(4)
    near, eta = s.normal(9, 3), s.normal(4, 3)
    points = near + offset
    agrees(Empirical(points), eta, oracle(points, eta), 4 * float(near.abs().max()))
    mask = torch.tensor([True] * 8 + [False])
    log_weights = torch.where(mask, 0.0, -torch.inf).double()
    agrees(Empirical(points, mask), eta, oracle(points, eta, log_weights), 4 * float(near.abs().max()))


def test_a_masked_point_may_lie_anywhere():
    s = Source(5)
    points, eta = s.normal(5, 3), s.normal(2, 3)
    beyond = torch.cat((points, torch.full((1, 3), 1e200, dtype=torch.float64)))
    h = Empirical(beyond, torch.tensor([True] * 5 + [False]))
    truth = oracle(points, eta)
    close(h.log_normalizer(eta), truth.log_normalizer, 10.0)
    close(h.mean(eta), truth.mean, 10.0)
    close(h.covariance(eta), truth.covariance, 10.0)


@DTYPES
def test_one_point(dtype):
    s = Source(6, dtype)
    points, eta = 1e3 * s.normal(1, 3), 1e3 * s.normal(4, 3)
    h = Empirical(points)
    close(h.log_normalizer(eta), (eta @ points.mT).squeeze(-1), 1e7)
    assert torch.equal(h.mean(eta), points.expand(4, 3))
    assert not bool(h.covariance(eta).any())
    assert not bool(h.entropy(eta).any())
    assert not bool(h.natural_gradient(eta).isnan().any())
    assert torch.equal(gz.dual(h, points).eta, torch.zeros_like(points))


@DTYPES
def test_all_points_equal(dtype):
    s = Source(7, dtype)
    points, eta = (1e3 * s.normal(1, 3)).expand(5, 3), 1e3 * s.normal(4, 3)
    h = Empirical(points)
    close(h.log_normalizer(eta), (eta @ points[0]) + math.log(5), 1e7)
    close(h.mean(eta), points[:1].expand(4, 3), 1e3)
    close(h.covariance(eta), torch.zeros(4, 3, 3, dtype=dtype), 1e6 * torch.finfo(dtype).eps)
    close(h.entropy(eta), torch.full((4,), math.log(5), dtype=dtype))


def test_a_hundred_thousand_points():
    s = Source(8)
    points, eta, log_weights = s.normal(100_000, 3), 3 * s.normal(2, 3), s.normal(100_000)
    agrees(Empirical(points, log_weights), eta, oracle(points, eta, log_weights), 2 * float(points.abs().max()))


@DTYPES
def test_four_thousand_and_ninety_six_dimensions(dtype):
    s = Source(9, dtype)
    points, eta, vector = s.normal(6, 4096), s.normal(2, 4096) / 16, s.normal(2, 4096)
    h, x = Empirical(points), points.double()
    logits = eta.double() @ x.mT
    p = logits.softmax(-1)
    mean = p @ x
    scale = (1 + float(logits.abs().max())) * float(points.abs().max())
    close(h.log_normalizer(eta), logits.logsumexp(-1).to(dtype), scale)
    close(h.mean(eta), mean.to(dtype), scale)
    products = torch.einsum("mn,mnd,mne,me->md", p, x - mean[:, None], x - mean[:, None], vector.double())
    size = float(points.norm(dim=-1).max() * vector.norm(dim=-1).max())
    close(h.covariance_product(eta, vector), products.to(dtype), scale * size)
    diagonal = gz.Gaussian.diagonal(points[0], points[1] ** 2)
    expected = points[0].double() + points[1].double() ** 2 * eta.double()
    close(diagonal.mean(eta), expected.to(dtype), float(expected.abs().max()))


@DTYPES
@pytest.mark.parametrize("magnitude", [1e1, 1e2, 1e4, 1e8, 1e15])
def test_saturated_rows_keep_a_nonnegative_variance_and_its_digits(magnitude, dtype):
    s = Source(10, dtype)
    points, eta, direction = s.normal(9, 3) + 100, magnitude * s.normal(50, 3), s.normal(50, 3)
    h, truth = Empirical(points), oracle(points, eta)
    covariance, product = h.covariance(eta), h.covariance_product(eta, direction)
    assert bool((covariance.diagonal(dim1=-2, dim2=-1) >= 0).all())
    assert bool(((product * direction).sum(-1) >= 0).all())
    assert bool((h.entropy(eta) >= 0).all())
    # Relative to each row's own covariance, however small, down to where the oracle's rounding begins.
    scale = (1 + truth.largest) * truth.covariance.abs().amax((-2, -1)) + 1e-20
    close(covariance, truth.covariance, scale[:, None, None])
    expected = (truth.covariance @ direction.unsqueeze(-1)).squeeze(-1)
    close(product, expected, scale.unsqueeze(-1) * direction.abs().amax(-1, keepdim=True))


FUNCTIONS = {
    "log_normalizer": (lambda h, e: h.log_normalizer(e), lambda x, w, e: (e @ x.mT + w).logsumexp(-1)),
    "mean": (lambda h, e: h.mean(e), lambda x, w, e: (e @ x.mT + w).softmax(-1) @ x),
    "covariance": (
        lambda h, e: h.covariance(e),
        lambda x, w, e: torch.func.vmap(torch.func.hessian(lambda r, b: (x @ r + b).logsumexp(-1)))(e, w),
    ),
    "covariance_product": (
        lambda h, e: h.covariance_product(e, e),
        lambda x, w, e: torch.func.jvp(lambda r: (r @ x.mT + w).softmax(-1) @ x, (e,), (e,))[1],
    ),
    "probabilities": (lambda h, e: h.probabilities(e)[..., :4], lambda x, w, e: (e @ x.mT + w).softmax(-1)),
    "entropy": (
        lambda h, e: h.entropy(e),
        lambda x, w, e: -torch.special.xlogy((p := (e @ x.mT + w).softmax(-1)), p).sum(-1),
    ),
    "relative_entropy": (
        lambda h, e: h.relative_entropy(e),
        lambda x, w, e: (e * ((s := e @ x.mT + w).softmax(-1) @ x)).sum(-1) - s.logsumexp(-1),
    ),
    "kl": (
        lambda h, e: h.kl(e, e.flip(-1)),
        lambda x, w, e: (
            (e.flip(-1) @ x.mT + w).logsumexp(-1)
            - (s := e @ x.mT + w).logsumexp(-1)
            - ((e.flip(-1) - e) * (s.softmax(-1) @ x)).sum(-1)
        ),
    ),
    "expect": (lambda h, e: h.expect(torch.sin, e), lambda x, w, e: (e @ x.mT + w).softmax(-1) @ x.sin()),
}


def masked_rows(among_unmasked):
    """Points far from 0, log weights of 3 queries with a masked point, the second (or every) row fully masked, eta."""
    s = Source(11)
    points, log_weights, eta = s.normal(5, 3) + 4, s.normal(3, 5), s.normal(3, 3)
    log_weights[:, 4] = -torch.inf
    dead = torch.tensor([not among_unmasked, True, not among_unmasked])
    return points, log_weights.masked_fill(dead.unsqueeze(-1), -torch.inf), eta, dead


@pytest.mark.parametrize("among_unmasked", [True, False], ids=["among unmasked rows", "all rows"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fully_masked_row_is_zero_with_its_derivatives(name, among_unmasked):
    points, log_weights, eta, dead = masked_rows(among_unmasked)
    ours, plain = FUNCTIONS[name]

    def masked(e, x, w):
        return ours(Empirical(x, w), e)

    # The oracle sees the rows that are alive, and of the points those that are not masked.
    def unmasked(e, x, w):
        return plain(x[:4], w[~dead, :4], e[~dead])

    arguments = (eta, points, log_weights)
    value = masked(*arguments)
    at_dead = torch.full_like(value[dead], -torch.inf if name == "log_normalizer" else 0.0)
    assert torch.equal(value[dead], at_dead)
    first, second = torch.func.jacrev, torch.func.jacfwd
    for order, derivative in (
        (0, lambda f, i: f),
        (1, lambda f, i: first(f, argnums=i)),
        (1, lambda f, i: second(f, argnums=i)),
        (2, lambda f, i: second(first(f, argnums=i), argnums=i)),
    ):
        for i in range(3):
            actual = derivative(masked, i)(*arguments)
            if order:
                assert not bool(actual[dead].any())  # which NaN would be
            if not among_unmasked:
                continue
            expected = derivative(unmasked, i)(*arguments)
            scale = 200.0 * 10**order  # points near 5, logits near 20
            close(actual[~dead], expected, scale)


def test_a_fully_masked_row_survives_backward_twice_and_vmap():
    points, log_weights, eta, dead = masked_rows(True)
    eta, points, log_weights = (t.requires_grad_() for t in (eta, points, log_weights))
    for ours, _ in FUNCTIONS.values():
        result = ours(Empirical(points, log_weights), eta)
        inputs = (eta, points, log_weights)
        gradients = torch.autograd.grad(
            result[~dead].sum() + result[dead].nan_to_num(0, 0, 0).sum(), inputs, create_graph=True
        )
        total = sum((g**2).sum() for g in gradients)
        for g in (*gradients, *torch.autograd.grad(total, inputs)):
            assert bool(g.isfinite().all())
        per_row = torch.func.vmap(lambda w, e, f=ours: f(Empirical(points, w), e))(log_weights, eta)
        close(per_row, result, 200.0)


def test_a_measure_without_mass_has_no_draws_no_density_and_no_dual():
    h, eta = Empirical(torch.ones(4, 3), torch.full((4,), -torch.inf)), torch.ones(2, 3)
    assert not bool(h.sample(eta, (5,)).any())
    assert h.log_density(eta, eta).tolist() == [-torch.inf] * 2
    assert not bool(h.natural_gradient(eta).any())
    assert gz.dual(h, eta).value.tolist() == [torch.inf] * 2


def test_a_measure_without_mass_stays_without():
    h, eta = Empirical(torch.ones(4, 3), torch.zeros(4, dtype=torch.bool)), torch.ones(3)
    other = gz.Gaussian.diagonal(torch.ones(3), torch.ones(3))
    operations = {
        "tilt": gz.tilt(h, eta),
        "convolve": gz.convolve(h, other),
        "add": gz.add(h, h),
        "pushforward": gz.pushforward(h, 2.0, eta),
        "reweight": gz.reweight(h, torch.tensor(3.0)),
    }
    for name, measure in operations.items():
        assert float(measure.log_normalizer(eta)) == -torch.inf, name
        for statistic in (measure.mean(eta), measure.covariance(eta), measure.relative_entropy(eta)):
            assert bool(statistic.isfinite().all()), name
        assert bool(torch.func.grad(measure.log_normalizer)(eta).isfinite().all()), name


def test_a_masked_part_counts_nothing_in_a_sum_and_in_a_mixture():
    s = Source(12)
    points, eta = s.normal(2, 4, 3), s.normal(3)
    alive, masked = Empirical(points[0]), Empirical(points[1], torch.zeros(4, dtype=torch.bool))
    log_weights = torch.tensor([[True] * 4, [False] * 4])
    parts = gz.Mixture(torch.tensor([0.5, 0.5]).double().log(), Empirical(points, log_weights))
    for h, shift in ((gz.add(alive, masked), 0.0), (parts, math.log(0.5))):
        close(h.log_normalizer(eta), oracle(points[0], eta[None]).log_normalizer[0] + shift, 10.0)
        close(h.mean(eta), oracle(points[0], eta[None]).mean[0], 10.0)
        close(h.covariance(eta), oracle(points[0], eta[None]).covariance[0], 10.0)
        assert bool(torch.func.hessian(h.log_normalizer)(eta).isfinite().all())


@DTYPES
def test_classical_families_far_out(dtype):
    def number(*x):
        return torch.tensor(x, dtype=dtype)

    spins, eta = gz.Spins(number(0.5, -0.5)), number(1e4, -1e4)
    close(spins.log_normalizer(eta), number(2e4 + 1 - 2 * math.log(2 * math.cosh(0.5)))[0], 2e4)
    assert spins.mean(eta).tolist() == [1.0, -1.0]
    assert not bool(spins.covariance(eta).any())

    one_hot, eta = gz.OneHot(number(0.5, 0.5).log()), number(1e4, -1e4)
    close(one_hot.log_normalizer(eta), number(1e4 - math.log(2))[0], 1e4)
    assert one_hot.mean(eta).tolist() == [1.0, 0.0]
    assert not bool(one_hot.covariance(eta).any())

    poisson, eta = gz.Poisson(number(2.0)), number(-1e4)
    assert float(poisson.log_normalizer(eta)) == -2.0
    assert float(poisson.mean(eta)) == 0.0

    gamma, eta = gz.Gamma(number(2.0), number(1.0)), number(-1e8)
    close(gamma.log_normalizer(eta), number(-2 * math.log1p(1e8))[0], 40.0)
    close(gamma.mean(eta), number(2 / (1 + 1e8)), 2e-8)

    inverse, eta = gz.InverseGaussian(number(1.0), number(1.0)), number(-1e8)
    close(inverse.log_normalizer(eta), number(1 - math.sqrt(1 + 2e8))[0], 2e4)
    close(inverse.mean(eta), number(1 / math.sqrt(1 + 2e8)), 1e-4)
