"""A fit with outliers maximises the likelihood summed over all sets of outliers, and outliers do not spoil it."""

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch

from gradlogz import Prior, Series, SwitchingModel, fit
from gradlogz.filters import Clutter, Generator, enumerate_modes, gpb2, prior_with_clutter, with_clutter
from support.measure_registry import Source
from support.scales import close

F64 = torch.float64


def system(seed, *, modes=2, s=2, o=2):
    g = Source(seed)
    T = g.positive(modes, modes) + 0.5
    model = SwitchingModel(
        T / T.sum(-1, keepdim=True), g.normal(modes, s, s) / 2, g.covariance(modes, s), g.normal(modes, o, s),
        g.covariance(modes, o), b=g.normal(modes, s), d=g.normal(modes, o),
    )  # fmt: skip
    return model, Prior(g.normal(s), g.covariance(s)), g


def log_normal(y, mean, covariance):
    return torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)


def by_sets(model, y, prior, clutter):
    """Log likelihood of each series: a sum over all sets of outliers, of the model without them; and the terms."""
    steps, terms, sets = y.shape[1], [], list(itertools.product((False, True), repeat=y.shape[1]))
    p = clutter.probability
    far = log_normal(y.nan_to_num(), clutter.mean, clutter.covariance)
    for outliers in map(torch.tensor, sets):
        rest = enumerate_modes(model, y.masked_fill(outliers[:, None], math.nan), prior).filtered.log_likelihood
        seen = (~y.isnan()).all(-1)
        count = (outliers & seen).sum(-1), (~outliers & seen).sum(-1)
        impossible = (outliers & ~seen).any(-1)  # a missing observation is no outlier
        term = rest + (far * (outliers & seen)).sum(-1) + count[0] * p.log() + count[1] * (1 - p).log()
        terms.append(term.masked_fill(impossible, -torch.inf))
    assert len(sets) == 2**steps
    return torch.stack(terms).logsumexp(0), torch.stack(terms), sets


@pytest.mark.parametrize("name", ["transition", "Q", "R", "b", "d", "clutter"])
def test_a_round_of_em_is_the_step_that_fisher_s_identity_gives(name):
    """Exact smoother, two modes, a missing observation; the likelihood and its gradient from sets of outliers."""
    model, prior, g = system(1)
    y = 2 * g.normal(4, 3, 2)
    y[1, 1] = torch.nan
    clutter = Clutter(torch.tensor(0.3, dtype=F64), 6 * g.covariance(2), g.normal(2))
    steps = y.shape[1]
    T = model.transition.expand(steps, 2, 2).clone().requires_grad_()
    fields = {n: getattr(model, n).clone().requires_grad_() for n in ("Q", "R", "b", "d")}
    p = clutter.probability.clone().requires_grad_()
    made = SwitchingModel(transition=T, F=model.F, H=model.H, **fields, per="time", validate=False)
    total, terms, sets = by_sets(made, y, prior, clutter._replace(probability=p))
    gradient = torch.autograd.grad(total.sum(), (*fields.values(), T, p), retain_graph=True)
    slopes = dict(zip((*fields, "T", "p"), gradient, strict=True))
    pairs = (T * slopes["T"]).detach()  # expected pairs of modes at each step
    motion = pairs.sum((0, 1))
    inliers = torch.zeros(
        2, dtype=F64
    )  # expected steps of each mode that are no outliers, missing ones counted by 1 - p
    weight = torch.softmax(terms.detach(), 0)
    missing = y.isnan().any(-1)
    for outliers, w, term in zip(map(torch.tensor, sets), weight, terms, strict=True):
        (slope,) = torch.autograd.grad((w * term.nan_to_num(neginf=0.0)).sum(), T, retain_graph=True)
        inliers += (T.detach() * slope)[~outliers].sum((0, 1))
    for i, t in missing.nonzero().tolist():  # only outliers of probability 0 were summed there
        (slope,) = torch.autograd.grad(total[i], T, retain_graph=True)
        inliers -= float(clutter.probability) * (T.detach() * slope)[t].sum(0)
    if name == "transition":
        want = pairs.sum(0) / pairs.sum((0, 2)).unsqueeze(-1)
    elif name == "clutter":
        # dl/dp = outliers / p - inliers / (1 - p) over the observed steps
        seen = float((~missing).sum())
        want = p.detach() + p.detach() * (1 - p.detach()) * slopes["p"] / seen
    elif name == "b":
        want = model.b + (model.Q @ slopes["b"].unsqueeze(-1)).squeeze(-1) / motion.unsqueeze(-1)
    elif name == "d":
        want = model.d + (model.R @ slopes["d"].unsqueeze(-1)).squeeze(-1) / inliers.unsqueeze(-1)
    else:
        old, slope = getattr(model, name), slopes[name]
        n = motion if name == "Q" else inliers
        want = old + old @ (slope + slope.mT) @ old / n[:, None, None]
    options = {"method": "em", "smoother": "enumerate", "max_iterations": 1, "clutter": clutter}
    found = fit(model, y, prior, learn=[name], **options)
    close(found.history[0], total.sum().detach(), scale=10.0)
    close(found.clutter.probability if name == "clutter" else getattr(found.model, name), want, tolerance=1e-9)
    assert float(found.history.diff()) > 0


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_both_methods_end_where_the_density_of_single_observations_is_largest(method):
    """Series of one step, for which gpb2 is exact: the maximum of a mixture density that scipy finds."""
    g = Source(2)
    n, far = 400, 900.0
    far_away = torch.rand(n, 1, 1, generator=torch.Generator().manual_seed(6)) < 0.15
    y = torch.where(far_away, 30 * g.normal(n, 1, 1), 1.5 * g.normal(n, 1, 1))
    one = torch.ones(1, 1, 1, dtype=F64)
    model = SwitchingModel(torch.ones(1, 1, dtype=F64), 0.5 * one, 0.2 * one, one, one)
    prior, clutter = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64)), Clutter(0.05, far * torch.eye(1))
    z = y.flatten().numpy()

    def loss(point):
        S, p = 0.45 + math.exp(point[0]), 1 / (1 + math.exp(-point[1]))
        inlier = (1 - p) * np.exp(-(z**2) / 2 / S) / math.sqrt(S)
        return -np.log(inlier + p * np.exp(-(z**2) / 2 / far) / math.sqrt(far)).sum()

    options = {"xatol": 1e-10, "fatol": 1e-12}
    best = scipy.optimize.minimize(loss, [0.0, -3.0], method="Nelder-Mead", options=options).x
    found = fit(model, y, prior, learn=["R", "clutter"], clutter=clutter, method=method, tolerance=1e-13)
    close(found.model.R.flatten(), torch.tensor([math.exp(best[0])], dtype=F64), tolerance=2e-4)
    close(found.clutter.probability, torch.tensor(1 / (1 + math.exp(-best[1])), dtype=F64), tolerance=2e-4)


def test_the_log_likelihood_is_that_of_the_filter_with_outliers():
    """Discrete time, and irregular times, whose model is discretised first."""
    model, prior, g = system(3)
    y, clutter = g.normal(3, 5, 2), Clutter(torch.tensor(0.1, dtype=F64), 50 * g.covariance(2), g.normal(2))
    wide = with_clutter(model, 0.1, clutter.covariance, mean=clutter.mean)
    found = fit(model, y, prior, learn=["Q"], clutter=clutter, max_iterations=1)
    close(found.history[0], gpb2(wide, y, prior_with_clutter(prior)).log_likelihood.sum(), scale=10.0)
    moving = SwitchingModel(Generator(torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)), *model_fields(model))
    dt = g.positive(3, 5)
    steps = with_clutter(moving.at(dt), 0.1, clutter.covariance, mean=clutter.mean)
    series, scales = Series(y, times=dt.cumsum(-1)), {"learn": ["Q"], "structure": {"Q": "scale"}}
    for method in ("em", "gradient"):
        found = fit(moving, series, prior, clutter=clutter, method=method, max_iterations=1, **scales)
        close(found.history[0], gpb2(steps, y, prior_with_clutter(prior)).log_likelihood.sum(), scale=10.0)


def model_fields(model):
    return (model.F, model.Q, model.H, model.R, model.b, model.d)


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_far_observations_do_not_spoil_what_is_learned(method):
    """Five per cent far away: learned noise as without them, to a standard error; spoiled if they are not expected."""
    g = Source(4)
    one = torch.ones(1, 1, 1, dtype=F64)
    truth = SwitchingModel(torch.ones(1, 1, dtype=F64), 0.9 * one, 0.5 * one, one, 0.3 * one)
    x, path = torch.zeros(40, dtype=F64), []
    for _ in range(30):
        x = 0.9 * x + 0.5**0.5 * g.normal(40)
        path.append(x + 0.3**0.5 * g.normal(40))
    clean = torch.stack(path, 1).unsqueeze(-1)
    far = torch.rand(40, 30, 1, generator=torch.Generator().manual_seed(5)) < 0.05
    dirty = torch.where(far, 50 * g.normal(40, 30, 1), clean)
    prior = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    options = {"method": method, "tolerance": 1e-6, "max_iterations": 400}
    best = fit(truth, clean, prior, learn=["Q", "R"], errors=True, **options)
    clutter = Clutter(0.01, 2500 * torch.eye(1))
    robust = fit(truth, dirty, prior, learn=["Q", "R", "clutter"], clutter=clutter, **options)
    spoiled = fit(truth, dirty, prior, learn=["Q", "R"], **options)
    for name in ("Q", "R"):
        error = best.standard_error[name]
        assert bool((getattr(robust.model, name) - getattr(best.model, name)).abs() < error), name
    assert float(spoiled.model.Q + spoiled.model.R) > 20
    assert abs(float(robust.clutter.probability) - float(far.double().mean())) < 0.01
    assert robust.converged
