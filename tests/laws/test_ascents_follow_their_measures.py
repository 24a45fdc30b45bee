"""A step on a measure follows the gradient of its log normaliser; natural steps and draws follow it in their ways.

x + tau W ∇G(beta B^T x)          for every measure, against derivatives of its log normaliser
x + tau (∇²_x G)^+ ∇_x G          natural gradient; the path of eta = beta B^T x does not depend on B
draws                             distribution by enumeration, mean and covariance those of attention
"""

import itertools
import math

import pytest
import torch
from scipy import stats

import gradlogz as gz
from gradlogz import Ascent, evolve
from gradlogz.dynamics import attention_step as steps_module
from support.measure_registry import NAMES, Source, case
from support.scales import close, scale_of

F64 = torch.float64
TAU = 0.3


def gradient(h, eta):
    return torch.func.grad(lambda e: h.log_normalizer(e).sum())(eta)


# Measures as keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_any_measure_is_a_gradient_step(name):
    h, eta, s = case(name, queries=(4,))
    d = h.dim
    B, W = torch.eye(d, dtype=F64) + 0.2 * s.normal(d, d) / math.sqrt(d), s.normal(d, d)
    x = torch.linalg.solve(0.7 * B.mT, eta.mT).mT
    scale = scale_of(h, eta) * (1 + W.norm()) * (1 + x.abs().max()) * torch.linalg.cond(B)
    close(
        evolve(x, Ascent(tau=TAU, beta=0.7, B=B, W_v=W, keys=h), steps=1).cloud,
        x + TAU * gradient(h, eta) @ W.mT,
        scale,
    )
    found = evolve(x, Ascent(tau=TAU, beta=0.7, B=B, keys=h), steps=0, observe=["log_normalizers", "entropy"]).observed
    G = h.log_normalizer(eta)
    close(found["log_normalizers"][0], G.sum(-1), 10 * scale_of(h, eta, 0))
    close(found["entropy"][0], (G - (eta * gradient(h, eta)).sum(-1)).mean(-1), 10 * scale * (1 + eta.abs().max()))


def test_a_measure_that_counts_points_is_these_points():
    s = Source(0)
    x, keys, B, W = s.normal(2, 5, 3), s.normal(2, 6, 3), s.normal(2, 3, 3), s.normal(2, 3, 3)
    names = ["entropy", "log_pair_energy", "log_normalizers"]
    beta, tau = torch.tensor([0.4, 0.9], dtype=F64), torch.tensor([0.3, 0.5], dtype=F64)
    points, measure = (
        evolve(x, Ascent(tau=tau, beta=beta, B=B, W_v=W, keys=k), contraction="rms_norm", steps=3, observe=names)
        for k in (keys, gz.Empirical(keys))
    )
    close(measure.cloud, points.cloud, 100.0)
    for name in names:
        close(measure.observed[name], points.observed[name], 100.0)
    assert measure.verdicts[0].kind == points.verdicts[0].kind


def test_a_measure_may_have_the_batch_of_the_clouds_or_none():
    s = Source(1)
    mu, Sigma, x = s.normal(2, 3), s.covariance(2, 3), s.normal(2, 5, 3)
    each = evolve(x, Ascent(keys=gz.Gaussian(mu, Sigma)), steps=2).cloud
    for i in range(2):
        h = gz.Gaussian(mu[i], Sigma[i])
        close(each[i], evolve(x, Ascent(keys=h), steps=2).cloud[i], 100.0)
        close(each[i], evolve(x[i], Ascent(keys=h), steps=2).cloud, 100.0)


def test_a_cloud_that_leaves_the_domain_of_its_keys_is_recorded():
    h = gz.Gamma(torch.tensor([1.0], dtype=F64), torch.tensor([2.0], dtype=F64))  # eta < 2
    cloud = torch.tensor([[[0.1], [1.9]], [[-3.0], [-1.0]], [[2.5], [0.0]]], dtype=F64)
    found = evolve(cloud, Ascent(tau=torch.tensor([1.0, 0.01, 1.0], dtype=F64), keys=h), steps=2)
    assert found.blown.tolist() == [2, -1, 1]
    close(found.cloud[0, 1], torch.tensor([1.9 + 1 / 0.1], dtype=F64), 100.0)  # the last finite state
    assert torch.equal(found.cloud[2], cloud[2])


def test_the_parameters_of_a_measure_have_gradients():
    s = Source(2)
    mu, W, x = s.normal(3).requires_grad_(), s.normal(3, 3), s.normal(5, 3)
    evolve(x, Ascent(tau=TAU, W_v=W, keys=gz.Gaussian(mu, s.covariance(3))), steps=1).cloud.sum().backward()
    close(mu.grad, 5 * TAU * W.sum(0), 10.0)


def test_directions_pass_through_vmap():
    s = Source(3)
    x, h = s.normal(4, 5, 3), gz.Mixture(s.log_simplex(2), gz.Gaussian(s.normal(2, 3), s.covariance(2, 3)))
    for step in (Ascent(keys=h), Ascent(keys=h, natural=True), Ascent(natural=True)):
        close(torch.func.vmap(lambda y, step=step: step.direction(y)[0])(x), step.direction(x)[0], 1e3)


# Natural gradients ----------------------------------------------------------------------------------------------------


def natural_by_definition(G, x):
    """(∇²G)^+ ∇G of a function of one token."""
    return torch.linalg.pinv(torch.func.hessian(G)(x), hermitian=True, rtol=1e-10) @ torch.func.grad(G)(x)


def test_a_natural_step_is_newtons_direction_of_the_log_normaliser():
    """Two heads: G is the mean of their log normalisers. The step divides by beta, as attention does."""
    s = Source(0)
    x, keys, B = s.normal(5, 3), s.normal(9, 3), s.normal(2, 3, 3)
    found = evolve(x, Ascent(tau=TAU, beta=0.6, B=B, keys=keys, natural=True), steps=1).cloud

    def G(y):
        return torch.stack([torch.logsumexp(0.6 * keys @ (y @ B[h]), 0) for h in range(2)]).mean()

    expected = torch.stack([y + TAU * natural_by_definition(G, y) for y in x])
    close(found, expected, 1e4)


@pytest.mark.parametrize("name", ["gaussian", "mixture of gaussians", "sphere", "gamma", "poisson", "bernoulli prior"])
def test_the_natural_path_of_eta_does_not_depend_on_coordinates(name):
    h, eta, s = case(name, queries=(4,), magnitude=0.5)
    d = h.dim
    expected = eta + TAU * h.natural_gradient(eta)
    for B in (torch.eye(d, dtype=F64), torch.eye(d, dtype=F64) + 0.3 * s.normal(d, d)):
        x = torch.linalg.solve(0.7 * B.mT, eta.mT).mT
        found = evolve(x, Ascent(tau=TAU, beta=0.7, B=B, keys=h, natural=True), steps=1).cloud
        close(0.7 * found @ B, expected, 1e4 * scale_of(h, eta) * torch.linalg.cond(B) ** 2)


def test_natural_steps_of_many_tokens_are_made_in_blocks(monkeypatch):
    x = Source(4).normal(2, 20, 3)
    for causal in (False, True):
        step = Ascent(beta=0.4, natural=True, causal=causal)
        whole = step.direction(x)[0]
        monkeypatch.setattr(steps_module, "BLOCK", 2 * 20 * 7)
        close(step.direction(x)[0], whole, 1e3)
        monkeypatch.undo()
    token = x[0, 6]

    def G(y):
        return torch.logsumexp(0.4 * x[0, :7] @ y, 0)

    close(whole[0, 6], natural_by_definition(G, token), 1e4)


# Draws ----------------------------------------------------------------------------------------------------------------


def resampling(seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return Ascent(**{"residual": False, "draws": 1, "generator": generator, **options})


@pytest.mark.parametrize("causal", [False, True])
def test_resampled_clouds_have_the_distribution_of_attention_weights(causal):
    """All 27 clouds that three tokens can become, by enumeration, against 20 000 draws."""
    x, clouds = Source(0).normal(3, 2), 20_000
    logits = 0.8 * x @ x.mT
    a = (logits.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf) if causal else logits).softmax(-1)
    found = evolve(x.expand(clouds, 3, 2), resampling(1, beta=0.8, causal=causal), steps=1).cloud
    which = torch.cdist(found, x.expand(clouds, 3, 2)).argmin(-1)
    close(found, x[which])
    counts = torch.bincount((which * torch.tensor([9, 3, 1])).sum(-1), minlength=27)
    outcomes = list(itertools.product(range(3), repeat=3))
    expected = clouds * torch.tensor([math.prod(float(a[i, j]) for i, j in enumerate(o)) for o in outcomes], dtype=F64)
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    assert stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("draws", [1, 4])
def test_the_mean_of_drawn_keys_is_attention_and_its_covariance_that_of_attended_keys(draws):
    s = Source(2)
    x, W, clouds = s.normal(3, 2), s.normal(2, 2), 40_000
    keys = s.normal(5, 2)
    found = evolve(
        x.expand(clouds, 3, 2), resampling(3, tau=TAU, W_v=W, keys=keys, draws=draws, residual=True), steps=1
    ).cloud
    a = (x @ keys.mT).softmax(-1)
    mean = a @ keys
    for i in range(3):
        F = (keys - mean[i]).mT @ (a[i].unsqueeze(-1) * (keys - mean[i]))
        variance = TAU**2 * (W @ F @ W.mT) / draws
        error = (found[:, i].mean(0) - x[i] - TAU * W @ mean[i]).abs()
        assert bool((error < 4.5 * (variance.diagonal() / clouds).sqrt()).all())
        torch.testing.assert_close(torch.cov(found[:, i].mT), variance, rtol=0, atol=0.06 * float(variance.trace()))


def test_draws_from_a_measure_have_its_tilted_distribution():
    s = Source(4)
    mu, Sigma, x = s.normal(2), s.covariance(2), s.normal(1, 2)
    found = evolve(x.expand(20_000, 1, 2), resampling(5, keys=gz.Gaussian(mu, Sigma)), steps=1).cloud[:, 0]
    z = torch.linalg.solve(torch.linalg.cholesky(Sigma), (found - mu - x @ Sigma).mT).flatten()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3


def test_draws_follow_their_generator_and_the_record_does_not(monkeypatch):
    x = Source(5).normal(30, 2)
    one, two = (evolve(x, resampling(7), steps=4, observe=["entropy"]) for _ in range(2))
    assert torch.equal(one.cloud, two.cloud)
    assert not torch.equal(one.cloud, evolve(x, resampling(8), steps=4).cloud)
    close(one.observed["entropy"][0], evolve(x, Ascent(), steps=0, observe=["entropy"]).observed["entropy"][0], 10.0)
    monkeypatch.setattr(steps_module, "BLOCK", 30 * 7)  # in blocks, every token still is one of the tokens
    found = evolve(x, resampling(9), steps=1).cloud
    assert float((found.unsqueeze(1) - x).norm(dim=-1).amin(-1).max()) < 1e-12


def test_resampling_loses_tokens_and_ends_in_one():
    """N samples generate N samples: without new ones, all have one ancestor in the end."""
    found = evolve(Source(6).normal(20, 2), resampling(10, beta=0.1), steps=300)
    assert found.verdict.kind == "collapsed"
