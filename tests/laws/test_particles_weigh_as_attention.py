"""Particles under tilting: importance weights are attention weights, and their mass estimates Z without bias.

[theory 8.5 for the chain beside it; neal01, delmoral06, douc05]
"""

import itertools
import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from gradlogz import Empirical, Gaussian, Spins
from gradlogz.measures import (
    anneal,
    draw_particles,
    effective_sample_size,
    gibbs_move,
    metropolis_move,
    random_walk_move,
    resample_ancestors,
)
from support.scales import close

F64 = torch.float64
SCHEMES = ["systematic", "stratified", "multinomial"]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def law():
    Sigma = torch.tensor([[1.0, 0.4], [0.4, 0.7]], dtype=F64)
    return torch.tensor([0.3, -0.2], dtype=F64), Sigma


def log_density(x):
    return MultivariateNormal(*law()).log_prob(x)


MOVES = {
    "gibbs": gibbs_move(Gaussian(*law())),
    "metropolis": metropolis_move(Gaussian(*law())),
    "random walk": random_walk_move(log_density, 0.8),
    "none": None,
}


def test_importance_weights_are_attention_weights():
    """The ratio of two normal densities, by torch, normalised: the softmax of the particles in the query."""
    mu, Sigma = law()
    eta, keys = drawn(1, 2), draw_particles(Gaussian(mu, Sigma), 50, generator=source())
    tilted = MultivariateNormal(mu + Sigma @ eta, Sigma)
    ratio = (tilted.log_prob(keys.points) - log_density(keys.points)).exp()
    w = ratio / ratio.sum()
    close(w, (keys.points @ eta).softmax(-1))
    close(w @ keys.points, keys.mean(eta), 10.0)
    # The log normaliser of the particles is the log of the mean of the potentials.
    close(keys.log_normalizer(eta), (keys.points @ eta).exp().mean().log(), 10.0)


def test_the_estimate_of_z_is_unbiased_by_enumeration():
    """All 3^4 ways to draw four particles of three atoms of mass 2.5: the mean of their masses under tilting is Z."""
    h = Empirical(drawn(2, 3, 2), (2.5 * drawn(3, 3).softmax(-1)).log())
    eta = drawn(4, 2)
    p = h.log_weights.exp() / 2.5
    total = sum(
        math.prod(float(p[i]) for i in ways) * 2.5 * sum(float((h.points[i] @ eta).exp()) for i in ways) / 4
        for ways in itertools.product(range(3), repeat=4)
    )
    close(torch.tensor(math.log(total), dtype=F64), h.log_normalizer(eta))
    # The package draws just these: every set of particles is one of the ways, with the weights of that estimate.
    found = draw_particles(h, 4, (500,), generator=source())
    index = torch.cdist(found.points, h.points).argmin(-1)
    estimate = 2.5 * (h.points[index] @ eta).exp().mean(-1)
    close(found.log_normalizer(eta.expand(500, 2)), estimate.log(), 10.0)


@pytest.mark.parametrize("schedule", [1, 7, [0.1, 0.5, 1.0]])
def test_all_points_of_an_empirical_measure_are_exact(schedule):
    h, eta = Empirical(drawn(5, 3, 20, 4), drawn(6, 3, 20)), drawn(7, 3, 4)
    found = anneal(h, eta, schedule=schedule, threshold=0.0)
    close(found.log_normalizer, h.log_normalizer(eta), 10.0)
    zero = torch.zeros_like(eta)
    close(found.particles.log_normalizer(zero), h.log_normalizer(eta), 10.0)
    close(found.particles.mean(zero), h.mean(eta), 10.0)
    assert not bool(found.resampled.any())
    w = (h.points @ eta.unsqueeze(-1)).squeeze(-1) + h.log_weights
    close(found.effective_sample_size[-1], 1 / w.softmax(-1).square().sum(-1), 20.0)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_estimate_of_z_is_unbiased(move, scheme):
    """4000 sets of 16 particles: the mean of estimate / Z is 1 within four of its standard errors."""
    h, eta = Gaussian(*law()), torch.tensor([1.2, -0.9], dtype=F64)
    start = draw_particles(h, 16, (4000,), generator=source(1))
    found = anneal(
        start, eta.expand(4000, 2), move=MOVES[move], schedule=4, scheme=scheme, threshold=0.6, generator=source(2)
    )
    ratio = (found.log_normalizer - h.log_normalizer(eta)).exp()
    error = float(ratio.std()) / 4000**0.5
    assert abs(float(ratio.mean()) - 1) < 4 * error < 0.08
    assert bool(found.resampled.any())
    assert not bool(found.resampled.all())


@pytest.mark.parametrize("move", ["gibbs", "metropolis", "random walk"])
def test_moves_leave_the_tilted_law_as_it_is(move):
    mu, Sigma = law()
    eta = torch.tensor([0.8, 0.5], dtype=F64)
    exact = MultivariateNormal(mu + Sigma @ eta, Sigma)
    torch.manual_seed(0)
    x, generator = exact.sample((40_000,)), source(3)
    start = x
    for _ in range(4):
        x = MOVES[move](x, eta, generator)
    assert bool((x != start).any(-1).double().mean() > 0.5)
    # 40 000 independent draws: standard errors of 0.005 and 0.007 at most.
    torch.testing.assert_close(x.mean(0), exact.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(x.mT.cov(), Sigma, rtol=0, atol=0.03)


def test_a_tilt_too_far_for_one_step_is_reached_in_many():
    """|eta| = 5: exp(25/2) is carried by draws that hardly occur; annealed particles get there."""
    h, eta = Gaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)), torch.tensor([4.0, 3.0], dtype=F64)
    sets = draw_particles(h, 200, (200,), generator=source(4))
    options = {"move": random_walk_move(lambda x: -x.square().sum(-1) / 2, 1.0), "schedule": 50, "generator": source(5)}
    found = anneal(sets, eta.expand(200, 2), **options)
    exact = h.log_normalizer(eta)
    annealed = (found.log_normalizer - exact).square().mean().sqrt()
    at_once = (sets.log_normalizer(eta.expand(200, 2)) - exact).square().mean().sqrt()
    assert float(annealed) < 0.5 < 1.5 < float(at_once)
    mean = found.particles.mean(torch.zeros(200, 2, dtype=F64))
    error = mean.std(0) / 200**0.5
    assert bool(((mean.mean(0) - h.mean(eta)).abs() < 4 * error + 0.05).all())


def test_the_mass_of_the_measure_is_counted():
    """Spins have mass 1, a counting measure of n points has n: at eta = 0 the estimate is exact."""
    for h in (Spins(drawn(8, 3)), Empirical(drawn(9, 7, 3))):
        zero = torch.zeros(3, dtype=F64)
        keys = draw_particles(h, 11, generator=source())
        close(keys.log_normalizer(zero), h.log_normalizer(zero), 10.0)
        close(anneal(keys, zero).log_normalizer, h.log_normalizer(zero), 10.0)


def test_batches_of_measures_come_first():
    h = Gaussian(drawn(10, 2, 3), torch.eye(3, dtype=F64).expand(2, 3, 3))
    keys = draw_particles(h, 5, (4,), generator=source())
    assert keys.points.shape == (2, 4, 5, 3)
    found = anneal(keys, drawn(11, 2, 4, 3), move=gibbs_move(h), generator=source())
    assert found.particles.points.shape == (2, 4, 5, 3)
    assert found.log_normalizer.shape == (2, 4)
    far = draw_particles(Gaussian(torch.tensor([[0.0], [100.0]], dtype=F64), torch.ones(2, 1, 1, dtype=F64)), 5)
    assert bool((far.points[1] - far.points[0] > 50).all())


def test_the_effective_sample_size_is_the_exponential_of_an_entropy():
    log_w = 2 * drawn(12, 6, 30)
    p = log_w.softmax(-1)
    close(effective_sample_size(log_w), torch.exp(-p.square().sum(-1).log()), 30.0)
    shannon = -(p * p.log()).sum(-1)
    assert bool((effective_sample_size(log_w) <= shannon.exp() * (1 + 1e-12)).all())
    close(effective_sample_size(torch.full((5,), -3.0, dtype=F64)), torch.tensor(5.0, dtype=F64))
    one = torch.full((5,), -torch.inf, dtype=F64)
    one[2] = 700.0
    close(effective_sample_size(one), torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_particles_come_as_often_as_their_weights_say(scheme):
    p = torch.tensor([0.0, 0.31, 0.02, 0.0, 0.45, 0.22, 0.0], dtype=F64)
    index = resample_ancestors(p.log().expand(20_000, 7), 10, scheme=scheme, generator=source(6))
    assert index.shape == (20_000, 10)
    counts = torch.nn.functional.one_hot(index, 7).sum(-2).double()
    assert bool((counts[:, p == 0] == 0).all())
    error = counts.std(0) / 20_000**0.5
    assert bool(((counts.mean(0) - 10 * p).abs() <= 4 * error).all())
    apart = (counts - 10 * p).abs().amax()
    if scheme == "systematic":
        assert float(apart) < 1
    elif scheme == "stratified":
        assert float(apart) < 2
    else:
        torch.testing.assert_close(counts.var(0), 10 * p * (1 - p), rtol=0.05, atol=1e-9)


def test_particles_without_mass_estimate_no_mass():
    nothing = Empirical(torch.randn(4, 2, dtype=F64), torch.full((4,), -torch.inf, dtype=F64))
    assert float(anneal(nothing, torch.ones(2, dtype=F64)).log_normalizer) == -torch.inf
    assert bool((resample_ancestors(nothing.log_weights) < 4).all())
