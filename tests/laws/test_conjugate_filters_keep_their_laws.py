"""Families, projections, dynamics and derivatives of the conjugate filters."""

import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import torch

from gradlogz import ConjugateFilter, Series
from gradlogz.filters import (
    BetaBinomial,
    DirichletMultinomial,
    Discount,
    GammaExponential,
    GammaPoisson,
    InverseWishartNormal,
    LinearGaussian,
    LinearMotion,
    Reset,
)
from gradlogz.measures import smat, svec
from gradlogz.special.digamma import (
    concentration,
    digamma_gap,
    digamma_gap_slope,
    inverse_digamma_gap,
    inverse_digamma_gaps,
)
from support.scales import close
from support.switching_oracles import chain

F64 = torch.float64


def number(x):
    return torch.tensor(x, dtype=F64)


def families():
    torch.manual_seed(0)
    A = torch.randn(3, 2, 2, dtype=F64)
    scale = A @ A.mT + 0.3 * torch.eye(2, dtype=F64)
    gaussian = LinearGaussian(torch.randn(2, 2, dtype=F64), torch.eye(2, dtype=F64))
    wishart = InverseWishartNormal(2)
    pairs = torch.rand(3, 4, dtype=F64) * 4 + 0.1
    return [
        (GammaPoisson(channels=2), pairs),
        (GammaExponential(channels=2), pairs),
        (BetaBinomial(4, channels=2), pairs),
        (DirichletMultinomial(3), torch.rand(3, 3, dtype=F64) * 4 + 0.1),
        (wishart, wishart.prior(number([2.5, 5.0, 9.0]), scale)),
        (gaussian, gaussian.prior(torch.randn(3, 2, dtype=F64), scale)),
    ]


FAMILIES = [pytest.param(*case, id=type(case[0]).__name__) for case in families()]


# The digamma function and its inverses ------------------------------------------------------------------------------


def test_the_gap_and_its_slope_keep_their_digits_from_1e_minus_6_to_1e12():
    x = torch.logspace(-6, 12, 37, dtype=F64)
    with mpmath.workdps(40):
        precise = [mpmath.mpf(float(v)) for v in x]
        gap = number([float(mpmath.log(v) - mpmath.digamma(v)) for v in precise])
        slope = number([float(1 / v - mpmath.psi(1, v)) for v in precise])
    close(digamma_gap(x), gap, gap, tolerance=1e-14)
    close(digamma_gap_slope(x), slope, slope.abs(), tolerance=1e-14)


def test_shapes_come_back_from_their_gaps():
    a = torch.logspace(-6, 12, 37, dtype=F64)
    close(inverse_digamma_gap(digamma_gap(a)), a, a, tolerance=2e-14)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_degrees_of_freedom_come_back_from_their_gaps(p):
    n = p - 1 + torch.logspace(-3, 8, 23, dtype=F64)
    with mpmath.workdps(40):
        precise = [mpmath.mpf(v) for v in n.tolist()]
        gap = [sum(mpmath.log(v / 2) - mpmath.digamma((v - i) / 2) for i in range(p)) for v in precise]
        gap = number([float(g) for g in gap])
    close(inverse_digamma_gaps(gap, p), n, n)


@pytest.mark.parametrize("c", [2, 3, 10])
@pytest.mark.parametrize("size", [1e-3, 0.3, 20.0, 1e4])
def test_concentrations_come_back_from_their_log_means(c, size):
    torch.manual_seed(c)
    a = size * (torch.rand(40, c, dtype=F64) + 1e-3)
    u = number(scipy.special.digamma(a.numpy()) - scipy.special.digamma(a.sum(-1, keepdim=True).numpy()))
    close(concentration(u), a, a * (1 + a.sum(-1, keepdim=True)), tolerance=1e-12)


@pytest.mark.parametrize("inverse", [inverse_digamma_gap, lambda g: inverse_digamma_gaps(g, 3), concentration])
def test_inverses_have_two_derivatives(inverse):
    points = number([[0.3, 2.0, 0.05]])
    if inverse is concentration:
        points = number(scipy.special.digamma([[0.4, 2.0, 7.0]]) - scipy.special.digamma(9.4))
    assert torch.autograd.gradcheck(inverse, points.requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(inverse, points)


# Families -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "natural"), FAMILIES)
def test_expectations_are_gradients_of_log_normalizers_and_links_their_inverses(family, natural):
    gradient = torch.func.grad(lambda e: family.log_normalizer(e).sum())(natural)
    close(family.expectation(natural), gradient, 1 + gradient.abs().max())
    close(family.natural(gradient), natural, 1 + natural.abs().max(), tolerance=1e-11)


@pytest.mark.parametrize(("family", "natural"), FAMILIES)
def test_collapsing_averages_expectations(family, natural):
    share = number([0.2, 0.3, 0.5])
    merged = family.collapse(share, natural)
    average = share @ family.expectation(natural)
    close(family.expectation(merged), average, 1 + average.abs().max())


def test_a_gamma_projection_is_the_minimum_of_the_divergence():
    """E[log q] of the mixture by quadrature, and its maximum over shape and rate by scipy."""
    weights, shapes, rates = np.array([0.35, 0.65]), np.array([2.0, 9.0]), np.array([1.0, 2.0])
    grid, steps = np.polynomial.legendre.leggauss(400)
    x, dx = 25 * (grid + 1), 25 * steps
    p = sum(w * scipy.stats.gamma.pdf(x, a, scale=1 / b) for w, a, b in zip(weights, shapes, rates, strict=True))

    def loss(logs):
        return -np.sum(dx * p * scipy.stats.gamma.logpdf(x, np.exp(logs[0]), scale=np.exp(-logs[1])))

    best = scipy.optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9})
    family = GammaPoisson()
    found = family.parameters(family.collapse(number(weights), family.prior(number(shapes), number(rates))))
    close(torch.cat(found), number(np.exp(best.x)), 1.0, tolerance=1e-6)


def test_the_example_of_the_theory_has_shape_2667_where_moments_would_give_3666():
    weights, a, b = number([0.35, 0.65]), number([2.0, 9.0]), number([1.0, 2.0])
    family = GammaPoisson()
    merged = family.parameters(family.collapse(weights, family.prior(a, b)))
    mean = (weights * a / b).sum()
    variance = (weights * (a / b**2 + (a / b - mean) ** 2)).sum()
    assert abs(float(merged.shape) - 2.667) < 5e-4
    assert abs(float(mean**2 / variance) - 3.666) < 5e-4
    close(merged.shape / merged.rate, mean.unsqueeze(0))


def test_a_beta_projection_is_the_minimum_of_the_divergence():
    weights, a, b = np.array([0.3, 0.7]), np.array([2.0, 6.0]), np.array([5.0, 1.5])

    def expected(f):
        parts = [scipy.stats.beta(*law).expect(f) for law in zip(a, b, strict=True)]
        return float(weights @ parts)

    means = [expected(np.log), expected(lambda x: np.log1p(-x))]

    def loss(logs):
        c, d = np.exp(logs)
        return scipy.special.betaln(c, d) - c * means[0] - d * means[1]

    best = scipy.optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9})
    family = BetaBinomial()
    found = family.collapse(number(weights), family.prior(number(a), number(b)))
    close(found, number(np.exp(best.x)), 1.0, tolerance=1e-6)


def test_a_collapse_of_sharp_laws_keeps_its_digits():
    """Two Gamma laws of shape 1e10 whose means differ by 1e-6: the gap is 1e-10 of what it is a difference of."""
    family = GammaPoisson()
    a, m = number([1e10, 1e10]), number([3.0, 3.0 * (1 + 1e-6)])
    found = family.parameters(family.collapse(number([0.5, 0.5]), family.prior(a, a / m)))
    with mpmath.workdps(50):
        A, M = mpmath.mpf(10) ** 10, [mpmath.mpf(v) for v in m.tolist()]
        rates = [mpmath.mpf(v) for v in (a / m).tolist()]
        M = [A / r for r in rates]
        gap = mpmath.log(sum(M) / 2) - sum(mpmath.digamma(A) - mpmath.log(r) for r in rates) / 2
        shape = mpmath.findroot(lambda s: mpmath.log(s) - mpmath.digamma(s) - gap, A / 200)
    close(found.shape, number([float(shape)]), float(shape), tolerance=1e-9)


# Dynamics -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "natural"), FAMILIES[:-1])
def test_forgetting_keeps_what_is_expected_of_an_observation(family, natural):
    """E[∇G0(theta)] = xi/nu does not change, and the variance grows."""
    before, after = (family.moments(e) for e in (natural, 0.8 * natural))
    if isinstance(family, GammaExponential):  # E[1/x]
        expected = [p.rate / (p.shape - 1) for p in map(family.parameters, (natural, 0.8 * natural))]
        close(expected[1], expected[0], 1 + expected[0].abs().max())
    else:
        close(after[0].nan_to_num(), before[0].nan_to_num(), 1 + before[0].nan_to_num().abs().max())
        assert bool((after[1] >= before[1]).all())


def filter_for(motion, family):
    return ConjugateFilter(family, transition=torch.ones(1, 1, dtype=F64), dynamics=[motion])


def moved_expectation(family, natural, motion):
    """Expectation parameters after one step without observation."""
    nothing = torch.full((1, family.observation_size), torch.nan, dtype=F64)
    return family.expectation(filter_for(motion, family).filter(nothing, prior=natural).natural[0, 0])


def test_scaled_rates_have_scaled_laws():
    factor = number([2.0, 0.3])
    for family in (GammaPoisson(channels=2), GammaExponential(channels=2)):
        natural = family.prior(number([2.0, 5.0]), number([1.0, 3.0]))
        before = family.expectation(natural).unflatten(-1, (2, 2))
        log_x, x = (0, 1) if isinstance(family, GammaPoisson) else (1, 0)
        want = before.clone()
        want[:, log_x], want[:, x] = before[:, log_x] + factor.log(), before[:, x] * factor
        close(moved_expectation(family, natural, LinearMotion(torch.diag(factor))), want.flatten(), 10.0)


def test_covariances_are_moved_by_congruence():
    family, W = InverseWishartNormal(2), number([[1.0, 0.5], [-0.3, 2.0]])
    natural = family.prior(number(6.0), number([[2.0, 0.4], [0.4, 1.0]]))
    before = family.expectation(natural)
    inverse = torch.linalg.inv(W)
    want = torch.cat((svec(inverse.mT @ smat(before[:-1]) @ inverse), before[-1:] - W.det().abs().log()))
    close(moved_expectation(family, natural, LinearMotion(W)), want, 10.0)


def test_categories_change_places_and_chances_their_complements():
    family, order = DirichletMultinomial(3), number([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    natural = family.prior(number([0.5, 2.0, 4.0]))
    close(moved_expectation(family, natural, LinearMotion(order)), order @ family.expectation(natural), 10.0)
    coin = BetaBinomial(channels=2)
    natural = coin.prior(number([0.5, 2.0]), number([4.0, 1.0]))
    motion = LinearMotion(torch.diag(number([-1.0, 1.0])), number([1.0, 0.0]))
    before = coin.expectation(natural)
    close(moved_expectation(coin, natural, motion), before[[1, 0, 2, 3]], 10.0)


# Series ---------------------------------------------------------------------------------------------------------------


def counts(*shape):
    return torch.poisson(3 * torch.ones(*shape, dtype=F64))


def switching(family, k=3, **options):
    torch.manual_seed(1)
    vague = family.prior(number(0.7), number(0.2))
    dynamics = [Discount(number(0.95)), Discount(number(0.6), vague), Reset(vague)][:k]
    return ConjugateFilter(family, transition=chain(k), dynamics=dynamics, **options)


OPTIONS = [{"depth": 1}, {"depth": 2}, {"depth": 3}, {"method": "imm"}]
IDS = ["gpb1", "gpb2", "gpb3", "imm"]


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_targets_steps_and_channels_are_what_they_are_alone(options):
    family = GammaPoisson(channels=2)
    chosen, y = switching(family, **options), counts(4, 6, 2)
    y[0, 2, 1] = y[3, 4] = torch.nan
    prior = family.prior(number([1.0, 2.0]), number([0.5, 1.0]))
    together = chosen.filter(y, prior=prior)
    for i in range(4):
        alone = chosen.filter(y[i], prior=prior)
        for a, b in zip(together, alone, strict=True):
            close(a[i], b, 1 + b.masked_fill(b.isinf(), 0).abs().max())
    state = chosen.init(prior=prior, batch_shape=(4,))
    for t in range(6):
        state, now = chosen.step(state, y[:, t])
        close(now.mean, together.mean[:, t], 10.0)
        close(now.log_mode_probability, together.log_mode_probability[:, t], 10.0)
    close(state.log_likelihood, together.log_likelihood, 100.0)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_series_end_where_their_lengths_say(options):
    family = GammaPoisson()
    chosen, y, prior = switching(family, **options), counts(2, 5, 1), family.prior(number(1.0), number(0.5))
    found = chosen.filter(Series(y, lengths=torch.tensor([5, 3])), prior=prior)
    short = chosen.filter(y[1, :3], prior=prior)
    close(found.log_likelihood[1], short.log_likelihood, 10.0)
    close(found.mean[1, 2], short.mean[2], 10.0)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_the_order_of_modes_does_not_matter(options):
    family = GammaPoisson()
    chosen, y, prior = switching(family, **options), counts(6, 1), family.prior(number(1.0), number(0.5))
    order = [2, 0, 1]
    other = ConjugateFilter(
        family,
        transition=chosen.transition[order][:, order],
        dynamics=[chosen.dynamics[i] for i in order],
        method=chosen.method,
        depth=chosen.depth,
    )
    a, b = chosen.filter(y, prior=prior), other.filter(y, prior=prior)
    close(b.mean, a.mean, 10.0)
    close(b.log_mode_probability, a.log_mode_probability[:, order], 10.0)
    close(b.log_likelihood, a.log_likelihood, 100.0)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_modes_that_cannot_be_reached_are_dead_and_do_no_harm(options):
    family = GammaPoisson()
    vague = family.prior(number(0.7), number(0.2))
    T = number([[0.8, 0.2, 0.0], [0.3, 0.7, 0.0], [0.5, 0.5, 0.0]])
    dynamics = [Discount(0.9), Reset(vague), Discount(0.5)]
    y, prior = counts(5, 1), family.prior(number(1.0), number(0.5))
    log_pi = number([0.6, 0.4, 0.0]).log()
    three = ConjugateFilter(family, transition=T, dynamics=dynamics, **options)
    two = ConjugateFilter(family, transition=T[:2, :2], dynamics=dynamics[:2], **options)
    a = three.filter(y, prior=prior, log_mode_probability=log_pi)
    b = two.filter(y, prior=prior, log_mode_probability=log_pi[:2])
    assert bool((a.log_mode_probability[:, 2] == -torch.inf).all())
    assert bool(a.mode_mean.isfinite().all())
    close(a.mean, b.mean, 10.0)
    close(a.log_likelihood, b.log_likelihood, 100.0)


def test_a_count_that_no_mode_can_produce_changes_nothing():
    family = GammaPoisson(number([0.0, 0.0]))
    chosen = ConjugateFilter(family, transition=chain(2), dynamics=[Discount(1.0), Discount(1.0)])
    prior = family.prior(number(2.0), number(1.0))
    found = chosen.filter(number([[4.0]]), prior=prior)
    assert float(found.step_log_likelihood) == -math.inf
    close(found.log_mode_probability, found.predicted_log_mode_probability)
    close(found.mean, number([[2.0]]))


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_outputs_have_derivatives_in_every_parameter(options):
    torch.manual_seed(3)
    y = counts(3, 1)

    def run(transition, factor, vague, prior, exposure, log_pi):
        family = GammaPoisson(exposure)
        chosen = ConjugateFilter(
            family,
            transition=transition.softmax(-1),
            dynamics=[Discount(factor), Reset(vague)],
            validate=False,
            **options,
        )
        found = chosen.filter(y, prior=prior, log_mode_probability=log_pi.log_softmax(-1))
        return found.log_likelihood, found.mean, found.variance, found.log_mode_probability

    arguments = (
        torch.randn(2, 2, dtype=F64),
        number(0.8),
        number([0.6, 0.3]),
        number([[1.5, 0.8], [2.0, 2.0]]),
        number([1.0, 1.7]),
        torch.randn(2, dtype=F64),
    )
    arguments = tuple(a.requires_grad_() for a in arguments)
    assert torch.autograd.gradcheck(run, arguments, check_forward_ad=True)


def test_filters_are_mapped_over_parameters():
    family = GammaPoisson()
    y, prior = counts(5, 1), family.prior(number(1.0), number(0.5))

    def likelihood(factor):
        dynamics = [Discount(factor), Discount(0.5)]
        chosen = ConjugateFilter(family, transition=chain2, dynamics=dynamics, validate=False)
        return chosen.filter(y, prior=prior).log_likelihood

    chain2, factors = chain(2), number([0.9, 0.7, 0.99])
    many = torch.func.vmap(torch.func.grad(likelihood))(factors)
    close(many, torch.stack([torch.func.grad(likelihood)(f) for f in factors]), 10.0)


def test_gpb2_beats_a_single_discounted_filter_on_bursts():
    """Counts whose rate jumps: predictive log score and error of the rate, 40 series of 150 counts.

    The single filter has the best discount of seven, chosen on the same series.
    """
    rng = np.random.default_rng(0)
    n, t = 40, 150
    rate, rates = rng.gamma(1.0, 8.0, size=n), []
    for _ in range(t):
        jumps = rng.random(n) < 0.04
        rate = np.where(jumps, rng.gamma(1.0, 8.0, size=n), rate)
        rates.append(rate)
    rates = np.stack(rates, 1)
    y, truth = number(rng.poisson(rates)).unsqueeze(-1), number(rates)
    family = GammaPoisson()
    vague = family.prior(number(1.0), number(1 / 8))
    T = number([[0.96, 0.04], [0.96, 0.04]])
    gpb2 = ConjugateFilter(family, transition=T, dynamics=[Discount(1.0), Reset(vague)]).filter(y, prior=vague)
    single = [
        ConjugateFilter(family, transition=torch.ones(1, 1, dtype=F64), dynamics=[Discount(f)]).filter(y, prior=vague)
        for f in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
    ]
    gained = gpb2.log_likelihood - torch.stack([s.log_likelihood for s in single]).amax(0)
    assert float(gained.mean() / t) > 0.1  # nats a count; 0.18 was seen
    error = [(f.mean.squeeze(-1) - truth).square().mean().sqrt() for f in (gpb2, *single)]
    assert float(error[0]) < 0.8 * float(min(error[1:]))


# At the edges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-300, -200, -30, 15, 100])
def test_shapes_that_hardly_are_numbers_come_back_from_their_gaps(exponent):
    a = number(10.0**exponent)
    close(inverse_digamma_gap(digamma_gap(a)), a, a, tolerance=2e-14)


@pytest.mark.parametrize("ratio", [1e-100, 1e-30, 1e30, 1e100])
def test_gamma_laws_of_any_means_collapse(ratio):
    """One of two laws alone, and both, against E[x] and E[log x] in forty digits."""
    family = GammaPoisson()
    natural = family.prior(number([3.0, 2.0]), number([1.0, ratio])).requires_grad_()
    close(family.collapse(number([1.0, 0.0]), natural), natural[0].detach(), 3.0)
    found = family.collapse(number([0.25, 0.75]), natural)
    assert torch.autograd.grad(found.log().sum(), natural)[0].isfinite().all()
    with mpmath.workdps(40):
        a, b = (mpmath.mpf(float(v)) for v in found.detach())
        mean = mpmath.mpf(0.25) * 3 + mpmath.mpf(0.75) * 2 / mpmath.mpf(ratio)
        log_mean = (mpmath.digamma(3) + 3 * (mpmath.digamma(2) - mpmath.log(mpmath.mpf(ratio)))) / 4
        assert abs(a / b / mean - 1) < 1e-14
        assert abs(mpmath.digamma(a) - mpmath.log(b) - log_mean) < 1e-12 * abs(log_mean)


@pytest.mark.parametrize("method", [("imm", 1), ("gpb", 1), ("gpb", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("seen", [True, False])
def test_zeros_and_gaps_for_ever_leave_laws(method, dtype, seen):
    """Zeros, or nothing at all, and modes that forget so much that numbers would end: 1e-180 is left."""
    transition = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=dtype)
    laws = {
        GammaPoisson(): [8.0, 1.0],
        BetaBinomial(3): [2.0, 1.0],
        BetaBinomial(10**6): [2.0, 1.0],
        DirichletMultinomial(3): [2.0, 1.0, 1.0],
    }
    for family, parameters in laws.items():
        prior = torch.tensor(parameters, dtype=dtype)
        y = torch.zeros(90, family.observation_size, dtype=dtype)
        if family.size == 3:
            y[:, 1] = 2.0  # one category alone
        y = y if seen else torch.full_like(y, torch.nan)
        options = {"dynamics": [Discount(1e-2), Discount(1e-3)], "method": method[0], "depth": method[1]}
        found = ConjugateFilter(family, transition=transition, **options).filter(y, prior=prior)
        assert all(part.isfinite().all() for part in found)
        assert family.in_domain(found.natural).all()
        if seen:
            assert found.mean[-1, 0] < 1e-4
            if dtype is F64:  # evidence of a million trials is beyond the digits of float32
                assert found.log_likelihood < 0
        else:
            assert found.log_likelihood.abs() < 1e-3


def test_forgetting_stops_where_numbers_end_and_keeps_what_is_expected():
    gamma, shares = GammaPoisson(channels=2), DirichletMultinomial(3)
    counts = number([1e-150, 2e-150, 4.0, 2.0])
    close(gamma.forgotten(1e-8, counts)[2:], 1e-8 * counts[2:], 1e-8)  # one channel does not stop another
    first = gamma.forgotten(1e-8, counts)[:2]
    close(first[1] / first[0], number(2.0), 1.0)
    assert (first > 1e-155).all()
    assert (first < counts[:2]).all()
    zeros = gamma.forgotten(0.5, number([1e-154, 10.0, 4.0, 2.0]))
    assert zeros[0] > 0.9e-154
    assert zeros[1] == 5.0
    votes = shares.forgotten(1e-30, number([1.0, 2.0, 3.0]))
    close(votes / votes[0], number([1.0, 2.0, 3.0]), 1.0)
    close(votes.min(), number(1e-5), 1e-5)


@pytest.mark.parametrize(("family", "natural"), FAMILIES[:-1])  # covariances average in their own coordinates
def test_laws_of_large_counts_collapse_in_single_precision(family, natural):
    large = 1e6 * natural[2].float()
    found = family.collapse(torch.tensor([0.3, 0.7]), large.expand(2, -1))
    close(found.double(), large.double(), large.abs().max().double(), tolerance=1e-5)


def test_a_mode_without_exposure_leaves_the_derivatives_of_the_other():
    def likelihood(exposure):
        family, chain_ = GammaPoisson(exposure), number([[0.5, 0.5], [0.5, 0.5]])
        vague = family.prior(number(1.0), number(1.0))
        bursts = ConjugateFilter(family, transition=chain_, dynamics=[Discount(0.9), Discount(0.8)])
        return bursts.filter(number([[0.0], [3.0], [0.0]]), prior=vague).log_likelihood

    exposure, step = number([0.0, 1.0]).requires_grad_(), 1e-6
    (slope,) = torch.autograd.grad(likelihood(exposure), exposure)
    with torch.no_grad():
        ahead = likelihood(number([step, 1.0])), likelihood(number([2 * step, 1.0]))
        first = (4 * ahead[0] - ahead[1] - 3 * likelihood(exposure)) / (2 * step)
        second = (likelihood(number([0.0, 1 + step])) - likelihood(number([0.0, 1 - step]))) / (2 * step)
    close(slope, torch.stack((first, second)), 1.0, tolerance=1e-8)


@pytest.mark.parametrize("method", [("imm", 1), ("gpb", 1), ("gpb", 2), ("gpb", 3)])
def test_priors_of_targets_belong_to_targets_also_where_there_are_as_many_modes(method):
    family = GammaPoisson()
    priors = family.prior(number([1.0, 5.0]), number([1.0, 0.5]))  # two targets, two modes
    y = number([[[2.0], [3.0], [9.0]], [[1.0], [0.0], [7.0]]])
    transition, begin = number([[0.7, 0.3], [0.4, 0.6]]), family.prior(number(2.0), number(1.0))

    def filtered(y, prior):
        dynamics = [Discount(0.9, prior), Reset(prior)]
        options = {"method": method[0], "depth": method[1]}
        return ConjugateFilter(family, transition=transition, dynamics=dynamics, **options).filter(y, prior=begin)

    together = filtered(y, priors)
    for i in range(2):
        close(together.mean[i], filtered(y[i], priors[i]).mean, 10.0)
        close(together.log_likelihood[i], filtered(y[i], priors[i]).log_likelihood, 10.0)


def test_a_discount_may_be_learned_without_a_word():
    factor = number(0.9).requires_grad_()
    family = GammaPoisson()
    vague = family.prior(number(1.0), number(1.0))
    alone = ConjugateFilter(family, transition=number([[1.0]]), dynamics=[Discount(factor)])
    y = number([[2.0], [1.0]])
    assert torch.autograd.gradcheck(
        lambda f: (
            ConjugateFilter(family, transition=number([[1.0]]), dynamics=[Discount(f)])
            .filter(y, prior=vague)
            .log_likelihood
        ),
        factor,
    )
    assert alone.filter(y, prior=vague).log_likelihood.requires_grad
