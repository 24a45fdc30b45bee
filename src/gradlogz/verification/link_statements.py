"""The canonical link, from means to natural parameters, and weights of conjugate priors.   [note 2, Eq. 15; E57-E59]

Read next: ../measures/duality.py, ../filters/conjugate/attention_filter.py (the linear link).
"""

import torch

from .. import measures as gz
from ..filters.conjugate import attention_filter
from .definition import FLOAT, normal, number, spread
from .statement import Outcome, gap, statement


@statement(
    "N2 Eq. 15, E57",
    "note 2 4",
    printed="<f(η_i), μ_j>",
    corrected="η_i = f(μ_i), f = (∇G)⁻¹ = ∇G*: for spins f = artanh",
    tolerance=1e-9,
)
def canonical_link() -> Outcome:
    eta = 0.5 * normal(4, 3, seed=1).clamp(-1.9, 1.9)  # where the printed f(η) is defined
    h = gz.Spins(torch.zeros(3, dtype=FLOAT))
    mu = h.mean(eta)
    return Outcome(
        max(gap(gz.mean_to_natural(h, mu), torch.atanh(mu)), gap(mu, eta.tanh())),
        gap(torch.atanh(eta), torch.atanh(mu)),
    )


@statement(
    "N2 Eq. 15 (linear)",
    "note 2 4",
    corrected="η ≈ μB + b by least squares: B = Σ⁻¹ for Gaussians, exactly; an error for keys",
)
def linear_link() -> Outcome:
    mu, Sigma, eta = normal(3, seed=1), spread(3, seed=2), normal(9, 3, seed=3)
    gaussian, precision = attention_filter.linear_link(gz.Gaussian(mu, Sigma), eta), torch.linalg.inv(Sigma)
    x = normal(7, 3, seed=4)
    keys, p = attention_filter.linear_link(gz.Empirical(x), eta), torch.softmax(eta @ x.T, -1)
    means = torch.cat((p @ x, torch.ones(9, 1, dtype=FLOAT)), -1)
    solution = torch.linalg.lstsq(means, eta).solution
    fitted, centred = means @ solution, eta - eta.mean(0)
    q = torch.softmax(fitted @ x.T, -1)
    return Outcome(
        max(
            gap(gaussian.matrix, precision, 100.0),
            gap(gaussian.offset, -mu @ precision, 100.0),
            gap(gaussian.r_squared, number(1.0)),
            gap(gaussian.divergence, number(0.0)),
            gap(keys.matrix, solution[:3], 1e3),
            gap(keys.offset, solution[3], 1e3),
            gap(keys.r_squared, 1 - (eta - fitted).square().sum() / centred.square().sum(), 100.0),
            gap(keys.divergence, (p * (p / q).log()).sum(-1).mean(), 100.0),
        )
    )


@statement(
    "E58",
    "note 2 4",
    printed="P(η_i|μ_j) ∝ e^<η_i,μ_j>",
    corrected="P(η_i|μ_j) ∝ e^(ν(<η_i,μ_j> - G(η_i))) ∝ e^(-ν KL(μ_j‖η_i))",
    tolerance=1e-9,
)
def conjugate_weights() -> Outcome:
    x, eta, natural, nu = normal(7, 3, seed=1), normal(4, 3, seed=2), normal(3, 3, seed=3), 2.0
    h = gz.Empirical(x)
    p, q = torch.softmax(natural @ x.T, -1), torch.softmax(eta @ x.T, -1)
    mu, kl = p @ x, (p.unsqueeze(1) * (p.unsqueeze(1) / q).log()).sum(-1)  # KL(μ_j‖η_i), [j, i]
    weights = torch.softmax(-nu * kl, -1)
    attention = gz.Empirical(eta, -nu * h.log_normalizer(eta)).probabilities(nu * mu)  # keys η with a bias
    linked = gz.mean_to_natural(h, mu)
    by_link = torch.stack([h.kl(linked, e.expand_as(linked)) for e in eta], -1)
    corrected = max(gap(attention, weights), gap(by_link, kl, 10.0))
    return Outcome(corrected, gap(torch.softmax(nu * mu @ eta.T, -1), weights))


@statement(
    "E59",
    "note 2 4.1",
    printed="alternating ∇G and its link moves",
    corrected="link(∇G(η)) = η: the alternation of one family is the identity",
    tolerance=1e-8,
)
def mean_then_link_is_the_identity() -> Outcome:
    x, eta = normal(7, 3, seed=1), normal(4, 3, seed=2)
    h, mean = gz.Empirical(x), torch.softmax(eta @ x.T, -1) @ x
    linear = gz.Gaussian(h.mean(0 * eta[0]), h.covariance(0 * eta[0]))  # an approximate link does move
    linked = max(gap(gz.mean_to_natural(h, mean), eta), gap(gz.mean_to_natural(h, h.mean(eta)), eta))
    return Outcome(linked, gap(gz.mean_to_natural(linear, mean), eta))
