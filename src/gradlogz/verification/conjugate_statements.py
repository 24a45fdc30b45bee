"""Conjugate families and their switching filters, compared with quadrature.   [note 2, Eq. 9, 10; theory 7.5, 7.6]

    p(θ|η) = exp(<η,T(θ)> - A(η)),   p(y|θ) = h0(y) exp <lik(y),T(θ)>,   so that η' = η + lik(y)

A family is a table of nodes: its statistics T, the logarithms of their masses at η = 0, and the parameter x.

Read next: ../filters/conjugate/families.py, ../filters/conjugate/conjugate_filter.py.
"""

from typing import NamedTuple

import torch
from torch import distributions as D

from .. import measures as gz
from .._typing import Float, Tensor
from ..filters.conjugate import conjugate_dynamics, families
from ..filters.conjugate.conjugate_dynamics import Discount, LinearMotion, Reset
from ..filters.conjugate.conjugate_filter import ConjugateFilter, ConjugateFiltered
from .definition import FLOAT, Nodes, by_definition, line, normal, number, plane, spread, uniform
from .statement import Outcome, gap, statement

# Note 2, section 3.2: linear maps and conjugate priors --------------------------------------------------------------


@statement(
    "N2 Eq. 9, E49",
    "note 2 3.2",
    printed="p(x') = p(x')/|W|",
    corrected="X' = WX: G'(s) = G(W^T s), mean W∇G(W^T s), for every W; density p(W⁻¹x')/|det W|",
)
def change_of_variables() -> Outcome:
    x, W, s = normal(5, 3, seed=1), normal(2, 3, seed=2), normal(4, 2, seed=3)
    moved = gz.pushforward(gz.Empirical(x), W)
    truth = by_definition(Nodes(x @ W.T, torch.zeros(5, dtype=FLOAT)), s)
    corrected = max(
        gap(moved.log_normalizer(s), truth.log_normalizer),
        gap(moved.mean(s), truth.mean),
        gap(moved.covariance(s), truth.covariance, 10.0),
    )
    eta = normal(3, seed=4)  # the image of a tilted measure: log E_η exp<Wx,s> = G(η + W^T s) - G(η)
    image, p = gz.pushforward(gz.tilt(gz.Empirical(x), eta), W), torch.softmax(x @ eta, 0)
    corrected = max(
        corrected,
        gap(image.log_normalizer(s), ((s @ W @ x.T).exp() @ p).log(), 10.0),
        gap(image.mean(0 * s[0]), W @ (p @ x), 10.0),
    )
    y, log_step = line(-40.0, 40.0)
    density = (-(y**2) / 2).exp() / (2 * torch.pi) ** 0.5 / 3.0 * log_step.exp()  # W = 3, argument not moved
    return Outcome(corrected, gap(density.sum(), number(1.0)))


@statement("N2 Eq. 10", "note 2 3.2", corrected="E[WX] = W E[X] for every distribution and every W")
def means_transform_linearly() -> Outcome:
    mu, Sigma, W, b = normal(3, seed=1), spread(3, seed=2), normal(2, 3, seed=3), normal(2, seed=4)
    h, zero = gz.pushforward(gz.Gaussian(mu, Sigma), W, b), torch.zeros(2, dtype=FLOAT)
    return Outcome(max(gap(h.mean(zero), W @ mu + b), gap(h.covariance(zero), W @ Sigma @ W.T, 10.0)))


@statement("E51", "note 2 3.2", printed="E[∇G0(θ)] = ξ", corrected="E[∇G0(θ)] = ξ/ν under the conjugate prior (ξ, ν)")
def prior_mean_of_the_statistic() -> Outcome:
    theta, _ = line(-40.0, 8.0)
    xi, nu = 2.5, 3.0
    prior = gz.ConjugatePrior(number(xi).reshape(1), number(nu), base="poisson")
    log_p = xi * theta - nu * theta.exp()
    log_p = log_p - log_p.logsumexp(0)
    expected = (log_p.exp() * theta.exp()).sum()  # ∇G0 = exp for the Poisson family
    zero = torch.zeros(1, dtype=FLOAT)
    mean = gap(prior.mean(zero)[0], (log_p.exp() * theta).sum())
    slope = prior.log_normalizer(torch.ones(1, dtype=FLOAT)).exp()  # E e^θ = Z(1)
    return Outcome(max(gap(expected, number(xi / nu)), gap(slope, expected), mean), gap(expected, number(xi)))


# Six conjugate families ---------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """A family with a table of nodes, parameters η, and an observation with its log density at the nodes."""

    family: families.ConjugateFamily
    T: Float[Tensor, "n p"]
    log_masses: Float[Tensor, "n"]
    x: Float[Tensor, "n s"]
    eta: Float[Tensor, "p"]
    y: Float[Tensor, "o"]
    log_likelihood: Float[Tensor, "n"]


def _cases() -> list[_Case]:
    """Six families; the nodes are even in the logarithm, the logit or the log ratios of the parameter."""
    u, log_du = line(-40.0, 8.0, 1201)
    s, log_ds = line(-40.0, 40.0, 1201)
    x, even, up = u.exp(), torch.zeros_like(u), torch.sigmoid(s)
    log_up, log_down = torch.nn.functional.logsigmoid(s), torch.nn.functional.logsigmoid(-s)
    ratios, log_area = plane(-30.0, 30.0, 141)
    log_shares = torch.log_softmax(torch.cat((ratios, 0 * ratios[:, :1]), -1), -1)
    a, b = uniform(1.5, 3.0, 1, seed=1), uniform(1.0, 2.0, 1, seed=2)
    H, R, d = uniform(0.7, 1.3, 1, 1, seed=3), uniform(0.3, 0.6, 1, 1, seed=4), uniform(-0.5, 0.5, 1, seed=5)
    three, five, counts = number(3.0).reshape(1), number(5.0).reshape(1), number(2.0, 0.0, 3.0)
    pair = torch.cat((a, b))
    positive, real = number(0.7).reshape(1), number(0.4).reshape(1)
    gauss = torch.cat((normal(1, seed=6), a))
    multinomial = D.Multinomial(5, logits=log_shares)
    return [
        _Case(
            families.GammaPoisson(), torch.stack((u, -x), -1), even + log_du, x.unsqueeze(-1), pair, three,
            D.Poisson(x).log_prob(three),
        ),
        _Case(
            families.GammaExponential(), torch.stack((-x, u), -1), u + log_du, x.unsqueeze(-1), pair, positive,
            D.Exponential(x).log_prob(positive),
        ),
        _Case(
            families.BetaBinomial(8), torch.stack((log_up, log_down), -1), 0 * s + log_ds, up.unsqueeze(-1), pair,
            five, D.Binomial(8, logits=s).log_prob(five),
        ),
        _Case(
            families.DirichletMultinomial(3), log_shares, 0 * ratios[:, 0] + log_area, log_shares.exp(),
            torch.cat((a, b, a)), counts, multinomial.log_prob(counts),
        ),
        _Case(
            families.InverseWishartNormal(1), torch.stack((-x / 2, u / 2), -1), u + log_du, 1 / x.unsqueeze(-1),
            torch.cat((a, b + 5.0)), real, D.Normal(number(0.0), x.rsqrt()).log_prob(real),
        ),
        _Case(
            families.LinearGaussian(H, R, d), torch.stack((s, -(s**2) / 2), -1), 0 * s + log_ds, s.unsqueeze(-1), gauss,
            real, D.Normal(H[0, 0] * s + d, R[0, 0].sqrt()).log_prob(real),
        ),
    ]  # fmt: skip


@statement(
    "7.5 families",
    "theory",
    corrected="A = log ∫ e^<η,T>, ∇A = E[T], link (∇A)⁻¹, moments of x, for six conjugate families",
)
def conjugate_families() -> Outcome:
    worst = 0.0
    for family, T, log_masses, x, eta, _, _ in _cases():
        log_p = T @ eta + log_masses
        A = log_p.logsumexp(0)
        p = (log_p - A).exp()
        mean = p @ x
        expectation = family.expectation(eta)
        actual_mean, actual_variance = family.moments(eta)
        worst = max(
            worst,
            gap(family.log_normalizer(eta), A, 10.0),
            gap(expectation, p @ T, 10.0),
            gap(family.natural(expectation), eta, 100.0),
            gap(actual_mean, mean, 10.0),
            gap(actual_variance, p @ (x - mean) ** 2, 100.0),
        )
    return Outcome(worst)


@statement(
    "7.5 update", "theory", corrected="p(y|θ) = h0(y) e^<lik(y),T>; log evidence = A(η+lik(y)) - A(η) + log h0(y)"
)
def conjugate_updates() -> Outcome:
    worst = 0.0
    for family, T, log_masses, _, eta, y, log_likelihood in _cases():
        likelihood = family.likelihood(y, torch.ones_like(y, dtype=torch.bool))
        natural, log_base = likelihood.natural.reshape(-1), likelihood.log_base.reshape(())
        visible = log_masses + T @ eta > -700.0  # beyond these nodes the mass underflows float64
        scale = 1 + log_likelihood[visible].abs()
        log_p = T @ eta + log_masses
        evidence = (log_p + log_likelihood)[visible].logsumexp(0) - log_p[visible].logsumexp(0)
        difference = family.log_normalizer(eta + natural) - family.log_normalizer(eta) + log_base
        worst = max(
            worst,
            gap((T @ natural + log_base)[visible] / scale, log_likelihood[visible] / scale),
            gap(difference, evidence, 10.0),
        )
    return Outcome(worst)


# Gamma and Poisson: counts of an unknown rate -----------------------------------------------------------------------

RATE, LOG_RATE_STEP = line(-30.0, 6.0, 901)  # logarithms of rates
DISCOUNT = 0.8


def _log_gamma_density(shape: Tensor, rate: Tensor) -> Float[Tensor, "*b n"]:
    """Log masses of Gamma(shape, rate) at the nodes, [*b, n]."""
    shape, rate = shape.unsqueeze(-1), rate.unsqueeze(-1)
    return shape * rate.log() - torch.lgamma(shape) + shape * RATE - rate * RATE.exp() + LOG_RATE_STEP


def _matched(p: Float[Tensor, "*b n"]) -> tuple[Tensor, Tensor]:
    """Shape and rate of the Gamma distribution with the E[x] and E[log x] of masses p, by Newton's method."""
    p = p / p.sum(-1, keepdim=True)
    x, log_x = p @ RATE.exp(), p @ RATE
    off = x.log() - log_x
    a = 0.5 / off
    for _ in range(50):
        a = a / (1 + (a.log() - torch.digamma(a) - off) / (1 - a * torch.polygamma(1, a)))
    return a, a / x


def _counts() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Transition, mode probabilities, shapes and rates of two modes, a prior for resetting, and a count."""
    T, pi = torch.softmax(normal(2, 2, seed=1), -1), torch.softmax(normal(2, seed=2), 0)
    return T, pi, uniform(1.5, 4.0, 2, seed=3), uniform(0.5, 1.5, 2, seed=4), number(2.0, 1.0), 3.0


def _moved(shape: Tensor, rate: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters of every mode i by every mode j: the first mode discounts, the second resets."""
    shapes = torch.stack((DISCOUNT * shape, reset[0].expand_as(shape)), -1)
    return shapes, torch.stack((DISCOUNT * rate, reset[1].expand_as(rate)), -1)


def _filtered(
    method: str, T: Tensor, pi: Tensor, shape: Tensor, rate: Tensor, reset: Tensor, y: float
) -> ConjugateFiltered:
    family = families.GammaPoisson()
    dynamics = [Discount(DISCOUNT), Reset(family.prior(*reset))]
    conjugate = ConjugateFilter(family, transition=T, dynamics=dynamics, method=method)  # type: ignore[arg-type]
    return conjugate.filter(number(y).reshape(1, 1), family.prior(shape, rate), log_mode_probability=pi.log())


def _residual(filtered: ConjugateFiltered, joint: Float[Tensor, "i j n"]) -> float:
    """Residual of filtered quantities against masses of (A, A', x), multiplied by the likelihood."""
    by_mode = joint.sum(0)
    mass, x = by_mode.sum(-1), RATE.exp()
    mean = by_mode @ x / mass
    shape, rate = families.GammaPoisson().parameters(filtered.natural[0])
    return max(
        gap(filtered.log_mode_probability[0].exp(), mass / mass.sum()),
        gap(filtered.step_log_likelihood[0], mass.sum().log(), 10.0),
        gap(filtered.mode_mean[0, :, 0], mean, 10.0),
        gap(filtered.mode_variance[0, :, 0], (by_mode * (x - mean.unsqueeze(-1)) ** 2).sum(-1) / mass, 100.0),
        gap(shape[:, 0] / rate[:, 0], mean, 10.0),  # the collapsed distribution has E[x] and E[log x]
        gap(torch.digamma(shape[:, 0]) - rate[:, 0].log(), by_mode @ RATE / mass, 10.0),
    )


def _poisson(y: float) -> Tensor:
    return (y * RATE - RATE.exp() - torch.lgamma(number(y + 1))).exp()


@statement(
    "7.5 GPB2",
    "theory",
    corrected="conjugate GPB2: η_ij = dyn_j(η_i) + lik(y), w_ij ∝ π_i T_ij L_ij, E[T] averaged over i for each j",
)
def conjugate_gpb2() -> Outcome:
    T, pi, shape, rate, reset, y = _counts()
    prior = _log_gamma_density(*_moved(shape, rate, reset)).exp()
    joint = (pi.unsqueeze(-1) * T).unsqueeze(-1) * prior * _poisson(y)
    return Outcome(_residual(_filtered("gpb", T, pi, shape, rate, reset, y), joint))


@statement(
    "7.5 IMM", "theory", corrected="conjugate IMM: E[T] averaged with π_i T_ij / c_j before the dynamics and the update"
)
def conjugate_imm() -> Outcome:
    T, pi, shape, rate, reset, y = _counts()
    c = pi @ T
    mixed = torch.einsum("ij,in->jn", pi.unsqueeze(-1) * T, _log_gamma_density(shape, rate).exp())
    shapes, rates = _moved(*_matched(mixed), reset)
    after = _log_gamma_density(shapes.diagonal(), rates.diagonal()).exp() * _poisson(y)
    return Outcome(_residual(_filtered("imm", T, pi, shape, rate, reset, y), (c.unsqueeze(-1) * after).unsqueeze(0)))


@statement(
    "7.5 Gamma",
    "theory",
    corrected="M-proj of Gammas matches E[x], E[log x]: 0.35 Γ(2,1) + 0.65 Γ(9,2) to shape 2.667 (3.666 by variance)",
)
def projection_of_gammas() -> Outcome:
    family, share = families.GammaPoisson(), number(0.35, 0.65)
    shape, rate = number(2.0, 9.0), number(1.0, 2.0)
    collapsed = family.parameters(family.collapse(share, family.prior(shape, rate)))
    p = share @ _log_gamma_density(shape, rate).exp()
    a, b = _matched(p)
    mean, variance = p @ RATE.exp(), p @ (RATE.exp() - p @ RATE.exp()) ** 2
    by_variance = mean**2 / variance
    quoted = float((a - 2.667).abs() > 5e-4 or (by_variance - 3.666).abs() > 5e-4)
    return Outcome(max(gap(collapsed.shape[0], a, 10.0), gap(collapsed.rate[0], b, 10.0), quoted))


@statement(
    "7.6",
    "theory",
    corrected="X' = WX stays in the family: Gamma if W > 0, Beta for 1-X, Gaussian for affine W; not Gamma + c",
)
def closed_families() -> Outcome:
    scale = number(1.7).reshape(1, 1)
    gamma, _, beta, _, _, gauss = _cases()
    minus, one, noise = -torch.ones(1, 1, dtype=FLOAT), torch.ones(1, dtype=FLOAT), number(0.3).reshape(1, 1)
    corners = number(-1.0, 1.0).reshape(-1, 1) * noise.sqrt()  # two points with the variance of the noise
    moves = [
        (gamma, LinearMotion(scale), 1.7 * gamma.x, lambda x: torch.stack((x.log(), -x), -1)),
        (beta, LinearMotion(minus, one), 1 - beta.x, None),
        (
            gauss,
            LinearMotion(scale, one, noise),
            1.7 * gauss.x + 1 + corners.T,
            lambda x: torch.stack((x, -(x**2) / 2), -1),
        ),
    ]
    worst = 0.0
    for case, motion, x, statistics in moves:
        p = torch.softmax(case.T @ case.eta + case.log_masses, 0)
        flipped = case.T.flip(-1)  # the statistics of 1 - x
        expected = p @ (flipped if statistics is None else statistics(x).mean(1))
        online = ConjugateFilter(case.family, transition=torch.ones(1, 1, dtype=FLOAT), dynamics=[motion])
        nothing = torch.full((1, 1), torch.nan, dtype=FLOAT)
        natural = online.filter(nothing, case.eta).natural[0, 0]
        worst = max(worst, gap(case.family.expectation(natural), expected, 10.0))
    shifted = conjugate_dynamics.is_closed_under(gamma.family, LinearMotion(scale, one)).closed
    squeezed = conjugate_dynamics.is_closed_under(beta.family, LinearMotion(0.5 * scale)).closed
    return Outcome(max(worst, float("inf") if shifted or squeezed else 0.0))
