"""Sampling by attention: the Gibbs chain of two measures, and particles.   [note 2, 4.1; paper 5; theory 8.5, 8.6]

    p(x, η) ∝ h(dx) g(dη) e^<x,η>          x is drawn by the attention of η, η by the attention of x

Chains are compared with the enumeration of all pairs of points, Gaussians with quadrature.

Read next: ../measures/gibbs.py, ../measures/annealing.py.
"""

import torch

from .. import measures as gz
from .._errors import InputValueError
from .._typing import Tensor
from .definition import FLOAT, Nodes, gaussian_nodes, generator, line, normal, number, spread
from .statement import Outcome, gap, statement, violation


def _finite() -> tuple[gz.Gibbs, Nodes, Nodes, Tensor]:
    """A pair of finite measures, their points, and the table of the joint distribution, [queries, keys]."""
    keys, queries = Nodes(normal(5, 3, seed=1), normal(5, seed=2)), Nodes(normal(4, 3, seed=3), normal(4, seed=4))
    joint = (queries.points @ keys.points.T + keys.log_masses + queries.log_masses.unsqueeze(-1)).exp()
    return gz.Gibbs(gz.Empirical(*keys), gz.Empirical(*queries)), keys, queries, joint


@statement(
    "8.5 Gibbs",
    "note 2 4.1",
    corrected="the chain draws key, then query; stationary: η_i with g_i Z_h(η_i), reversible; for finite sets",
)
def stationary_distribution() -> Outcome:
    gibbs, _, _, joint = _finite()
    to_key, to_query = joint / joint.sum(1, keepdim=True), (joint / joint.sum(0)).T
    step, stationary = gibbs.transition(), gibbs.stationary()
    flow = stationary.unsqueeze(-1) * step
    return Outcome(
        max(
            gap(step, to_key @ to_query),
            gap(stationary, joint.sum(1) / joint.sum()),
            gap(stationary @ step, stationary),
            gap(flow, flow.T),
            gap(gibbs.log_mass(), joint.sum().log(), 10.0),
        )
    )


@statement(
    "8.5 Gaussian",
    "note 2 4.1",
    corrected="h = N(μ,Σ), g = N(a,B): mass ∫ Z_h dg, det(I - BΣ)^(-1/2) if centred, finite iff ρ(BΣ) < 1",
)
def mass_of_two_gaussians() -> Outcome:
    Sigma, C = spread(2, seed=1), spread(2, seed=2)
    B = 0.4 * C / torch.linalg.eigvals(C @ Sigma).abs().max()  # ρ(BΣ) = 0.4
    mu, a = normal(2, seed=3), normal(2, seed=4)
    worst, zero = 0.0, torch.zeros(2, dtype=FLOAT)
    for mean, start in ((mu, a), (zero, zero)):
        eta, log_g = gaussian_nodes(start, B, 16.0, 81)
        log_Z = eta @ mean + ((eta @ Sigma) * eta).sum(-1) / 2
        mass = gz.Gibbs(gz.Gaussian(mean, Sigma), gz.Gaussian(start, B)).log_mass()
        worst = max(worst, gap(mass, (log_g + log_Z).logsumexp(0), 10.0))
    centred = -torch.linalg.det(torch.eye(2, dtype=FLOAT) - B @ Sigma).log() / 2
    return Outcome(max(worst, gap(mass, centred, 10.0)))


@statement(
    "8.5 critical",
    "note 2 4.1",
    printed="alternating updates converge to a stationary distribution",
    corrected="B = Σ⁻¹ of Theorem 1 is critical: at ρ(BΣ) = 1 the mass over [-L,L] grows as L, and Gibbs refuses",
)
def critical_case() -> Outcome:
    """∫ Z_h dN(0, B) over [-L, L] is a multiple of L at ρ = 1; below it converges to (1 - ρ)^(-1/2)."""
    sigma = number(1.7)

    def mass(rho: float, ends: float) -> Tensor:
        eta, log_step = line(-ends, ends, 4001)
        variance = rho / sigma
        return (
            (sigma * eta**2 / 2 - eta**2 / (2 * variance) - (2 * torch.pi * variance).log() / 2 + log_step).exp().sum()
        )

    def gibbs(rho: float) -> gz.Gibbs:
        zero = torch.zeros(1, dtype=FLOAT)
        return gz.Gibbs(gz.Gaussian(zero, sigma.reshape(1, 1)), gz.Gaussian(zero, (rho / sigma).reshape(1, 1)))

    below = gap(gibbs(0.9).log_mass(), mass(0.9, 60.0).log(), 10.0)
    try:
        gibbs(1.0)
    except InputValueError:
        refused = 0.0
    else:
        refused = float("inf")
    growth = mass(1.0, 40.0) / mass(1.0, 20.0)
    return Outcome(max(below, refused, gap(growth, number(2.0), 10.0)), float(growth - 1))


@statement(
    "8.5 mean field",
    "note 2 4.1",
    corrected="x = ∇G_h(η), η = ∇G_g(x): <x,η> - G_h*(x) - G_g*(η) rises, and is at most the log mass",
)
def mean_field() -> Outcome:
    gibbs, keys, queries, joint = _finite()
    start = normal(6, 3, seed=5)
    result = gibbs.mean_field(start, steps=6)

    def attention(nodes: Nodes, at: Tensor) -> tuple[Tensor, Tensor]:
        """∇G and the entropy relative to the measure, -G* at the mean."""
        p = torch.softmax(at @ nodes.points.T + nodes.log_masses, -1)
        return p @ nodes.points, -(p * (p.log() - nodes.log_masses)).sum(-1)

    eta, bounds = start, []
    for _ in range(6):
        x, _ = attention(keys, eta)
        eta, of_eta = attention(queries, x)
        x, of_x = attention(keys, eta)
        bounds.append((x * eta).sum(-1) + of_x + of_eta)
    expected = torch.stack(bounds)
    return Outcome(
        max(
            gap(result.bound, expected, 10.0),
            gap(result.x, x),
            gap(result.eta, eta),
            violation(result.bound[:-1], result.bound[1:], 10.0),
            violation(result.bound, joint.sum().log().expand_as(result.bound), 10.0),
        )
    )


@statement(
    "8.6 particles",
    "paper 5",
    corrected="importance weights of draws from h are attention weights of η; their log Z and mean; size 1/Σw²",
)
def particles_are_keys() -> Outcome:
    mu, Sigma, eta = normal(2, seed=1), spread(2, seed=2), normal(2, seed=3)
    particles = gz.draw_particles(gz.Gaussian(mu, Sigma), 40, generator=generator(4))
    x = particles.points

    def log_density(mean: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(mean, Sigma).log_prob(x)

    log_w = log_density(mu + Sigma @ eta) - log_density(mu)  # the tilted Gaussian against h
    w, G = log_w.softmax(0), mu @ eta + eta @ Sigma @ eta / 2
    return Outcome(
        max(
            gap(particles.probabilities(eta), w, 10.0),
            gap(particles.log_normalizer(eta), G + (log_w.logsumexp(0) - number(40.0).log()), 10.0),
            gap(particles.mean(eta), w @ x, 10.0),
            gap(gz.effective_sample_size(particles.points @ eta), 1 / (w**2).sum(), 100.0),
        )
    )


@statement(
    "8.6 annealing",
    "paper 5",
    corrected="tilting in steps gives Σ w e^<x,η>; resampling keeps it, each point floor or ceil of N w times",
)
def annealing() -> Outcome:
    x, log_w, eta = normal(6, 3, seed=1), normal(6, seed=2), 2 * normal(3, seed=3)
    start, weights = gz.Empirical(x, log_w), torch.softmax(x @ eta + log_w, 0)
    result = gz.anneal(start, eta, schedule=4, threshold=0.0, generator=generator(4))
    once = gz.anneal(start, eta, schedule=1, threshold=1.0, generator=generator(5))
    drawn = gz.resample_ancestors(weights.log(), 50, generator=generator(6)).bincount(minlength=6)
    off = (drawn - 50 * weights).abs().max()
    G, zero = torch.logsumexp(x @ eta + log_w, 0), torch.zeros(3, dtype=FLOAT)
    sizes = torch.stack([1 / (torch.softmax(t * x @ eta + log_w, 0) ** 2).sum() for t in (0.25, 0.5, 0.75, 1.0)])
    return Outcome(
        max(
            gap(result.log_normalizer, G, 10.0),
            gap(result.particles.mean(zero), weights @ x, 10.0),
            gap(result.effective_sample_size, sizes, 10.0),
            gap(once.log_normalizer, G, 10.0),
            violation(off, number(1.0)),
        )
    )
