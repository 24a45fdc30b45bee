"""Histories that are drawn beside all of them: no bias in the likelihood, errors that fall with the root of n."""

import math
from dataclasses import replace

import pytest
import torch

from gradlogz import Prior, SwitchingModel
from gradlogz.filters import enumerate_modes, rao_blackwell_filter
from support.switching_oracles import F64, beginning, chain, observed, same, system

RUNS = 400


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("particles", [1, 5])
def test_the_likelihood_has_no_bias(threshold, particles):
    """The average of p(y) over runs, with so few particles that its logarithm is far off: within 4 standard errors."""
    model, start = system(2, 2, 1), beginning(2)
    y = observed(model, 4)
    true = enumerate_modes(model, y, start).filtered.log_likelihood
    runs = 4000
    found = rao_blackwell_filter(
        model, y.expand(runs, 4, 1), start, particles=particles, threshold=threshold, generator=generator()
    )
    ratio = (found.filtered.log_likelihood - true).exp()
    assert ratio.std() > 0.01
    assert (ratio.mean() - 1).abs() < 4 * ratio.std() / math.sqrt(runs)


def test_errors_fall_with_the_root_of_the_number_of_particles():
    model, start = system(3, 2, 1), beginning(3)
    y = observed(model, 4)
    true = enumerate_modes(model, y, start).filtered
    errors = []
    for n in (8, 128):
        found = rao_blackwell_filter(model, y.expand(RUNS, 4, 1), start, particles=n, generator=generator()).filtered
        state = (found.mean - true.mean).square().mean().sqrt()
        mode = (found.log_mode_probability.exp() - true.log_mode_probability.exp()).square().mean().sqrt()
        likelihood = (found.log_likelihood - true.log_likelihood).square().mean().sqrt()
        errors.append(torch.stack((state, mode, likelihood)))
    ratio = errors[0] / errors[1]
    assert bool(((ratio > 4 / 1.6) & (ratio < 4 * 1.6)).all()), ratio  # sixteen times as many, a quarter of the error


def test_one_step_is_exact_if_every_mode_is_there():
    """The first observation meets all branches; with equal modes and as many particles, none is left out."""
    model, start = system(2), beginning(2)
    start = replace(start, log_mode_probability=torch.full((2,), -math.log(2), dtype=F64))
    y = observed(model, 1)
    found = rao_blackwell_filter(model, y, start, particles=8, generator=generator())
    same(found.filtered, enumerate_modes(model, y, start).filtered, 10.0)


def test_one_mode_is_exact_whatever_is_drawn():
    model, start = system(1, 3, 2), beginning(1, 3)
    y = observed(model, 6)
    y[1], y[2, 0] = torch.nan, torch.nan
    found = rao_blackwell_filter(model, y, start, particles=3, generator=generator())
    same(found.filtered, enumerate_modes(model, y, start).filtered, 10.0)
    assert (found.histories == 0).all()
    torch.testing.assert_close(found.effective_sample_size, torch.full((6,), 3.0, dtype=F64))


def test_histories_are_those_of_their_states():
    """Each particle's Gaussian is what the exact filter has for its history, through every draw."""
    model, start = system(2), beginning(2)
    y = observed(model, 5)
    found = rao_blackwell_filter(model, y, start, particles=12, threshold=0.9, generator=generator(3))
    assert bool(found.resampled.any())
    all_of_them = enumerate_modes(model, y, start)
    at = (found.histories.unsqueeze(-2) == all_of_them.histories.unsqueeze(-3)).all(-1).int().argmax(-1)
    assert torch.equal(all_of_them.histories[at], found.histories)
    torch.testing.assert_close(found.mean, all_of_them.mean[at], rtol=0, atol=1e-11)
    torch.testing.assert_close(found.covariance, all_of_them.covariance[at], rtol=0, atol=1e-11)
    torch.testing.assert_close(found.log_probability.logsumexp(-1), torch.zeros((), dtype=F64))


def test_weighted_histories_have_the_probabilities_of_enumeration():
    model, start = system(2, 1, 1), beginning(2, 1)
    y = observed(model, 2)
    true = enumerate_modes(model, y, start)
    found = rao_blackwell_filter(model, y.expand(RUNS, 2, 1), start, particles=50, generator=generator())
    share = (found.histories.unsqueeze(-2) == true.histories).all(-1) * found.log_probability.exp().unsqueeze(-1)
    share = share.sum(-2)  # [runs, histories]
    away = (share.mean(0) - true.log_probability.exp()).abs()
    assert bool((away < 5 * share.std(0) / math.sqrt(RUNS) + 1e-3).all())


def test_targets_have_draws_of_their_own_and_models_of_their_own():
    n, steps = 3, 5
    T = torch.stack([chain(2) for _ in range(n)]).unsqueeze(1)
    model = system(2, lead=(n, steps), transition=T)
    y, start = observed(model, steps, n), beginning(2)
    y[0, 2] = torch.nan
    found = rao_blackwell_filter(model, y, start, particles=2000, generator=generator())
    true = enumerate_modes(model, y, start).filtered
    assert (found.filtered.mean - true.mean).abs().amax() < 0.3
    assert found.histories.shape == (n, 2000, steps + 1)
    again = rao_blackwell_filter(model, y, start, particles=2000, generator=generator())
    same(again.filtered, found.filtered)
    other = rao_blackwell_filter(model, y, start, particles=2000, generator=generator(1))
    assert not torch.equal(other.filtered.mean, found.filtered.mean)


def test_dead_modes_and_impossible_observations_harm_nothing():
    T = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], dtype=F64)
    model, start = system(3, transition=T), beginning(3)
    start = replace(start, log_mode_probability=torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64))
    y = observed(model, 4)
    y[2] = 1e200
    found = rao_blackwell_filter(model, y, start, particles=20, generator=generator())
    same(found.filtered, enumerate_modes(model, y, start).filtered, 10.0)
    assert (found.histories[:, 1:] == 1).all()


def test_a_particle_that_cannot_go_on_is_left_behind():
    """Of two modes that never switch one is impossible after an outlier: its particles have no weight."""
    fields = (torch.tensor(v, dtype=F64)[:, None, None] for v in ([1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1e-300, 1.0]))
    model = SwitchingModel(torch.eye(2, dtype=F64), *fields)
    y = torch.tensor([[1e10], [2.0]], dtype=F64)
    start = Prior(torch.zeros(1, dtype=F64), torch.zeros(1, 1, dtype=F64))
    found = rao_blackwell_filter(model, y, start, particles=10, threshold=0.0, generator=generator())
    same(found.filtered, enumerate_modes(model, y, start).filtered, 10.0)
    assert int((found.log_probability > -torch.inf).sum()) == 5
