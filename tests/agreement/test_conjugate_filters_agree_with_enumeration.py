"""Conjugate filters against every history of modes, written out with scipy's predictive laws."""

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from gradlogz import ConjugateFilter, Series, gpb1, gpb2, imm
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
    gpb,
)
from gradlogz.measures import smat
from support.scales import close
from support.switching_oracles import beginning, chain, observed, system

F64 = torch.float64


class Gamma:
    """Poisson counts, in the usual parameters."""

    family = GammaPoisson()

    def draw(self, rng):
        return rng.gamma(2.0, size=2) + 0.1

    def observations(self, rng, t):
        return rng.poisson(3.0, size=(t, 1)).astype(float)

    def natural(self, law):
        return self.family.prior(*(torch.tensor(x, dtype=F64) for x in law))

    def discounted(self, law, factor):
        return factor * law

    def updated(self, law, y):
        a, b = law
        return np.array([a + y[0], b + 1]), scipy.stats.nbinom.logpmf(y[0], a, b / (b + 1))

    def mean(self, law):
        return np.array([law[0] / law[1]])


class Waiting(Gamma):
    """Exponential times; forgetting keeps the time that is expected, b / (a - 1)."""

    family = GammaExponential()

    def draw(self, rng):
        return rng.gamma(2.0, size=2) + np.array([1.1, 0.1])

    def observations(self, rng, t):
        return rng.exponential(size=(t, 1))

    def discounted(self, law, factor):
        return np.array([factor * (law[0] - 1) + 1, factor * law[1]])

    def updated(self, law, y):
        a, b = law
        return np.array([a + 1, b + y[0]]), scipy.stats.lomax.logpdf(y[0], a, scale=b)


class Beta(Gamma):
    family = BetaBinomial(5)

    def observations(self, rng, t):
        return rng.integers(0, 6, size=(t, 1)).astype(float)

    def updated(self, law, y):
        a, b = law
        return np.array([a + y[0], b + 5 - y[0]]), scipy.stats.betabinom.logpmf(y[0], 5, a, b)

    def mean(self, law):
        return np.array([law[0] / law.sum()])


class Dirichlet(Gamma):
    family = DirichletMultinomial(3)

    def draw(self, rng):
        return rng.gamma(2.0, size=3) + 0.1

    def observations(self, rng, t):
        return rng.integers(0, 4, size=(t, 3)).astype(float)

    def natural(self, law):
        return self.family.prior(torch.tensor(law, dtype=F64))

    def updated(self, law, y):
        return law + y, scipy.stats.dirichlet_multinomial.logpmf(y.astype(int), law, int(y.sum()))

    def mean(self, law):
        return law / law.sum()


class Covariance:
    """Vectors of unknown covariance; a law is (df, scale)."""

    family = InverseWishartNormal(2)

    def draw(self, rng):
        A = rng.normal(size=(2, 2))
        return (rng.uniform(4, 8), A @ A.T + 0.3 * np.eye(2))

    def observations(self, rng, t):
        return rng.normal(size=(t, 2))

    def natural(self, law):
        return self.family.prior(*(torch.as_tensor(x, dtype=F64) for x in law))

    def discounted(self, law, factor):
        return (factor * (law[0] - 3) + 3, factor * law[1])

    def updated(self, law, y):
        df, scale = law
        free = df - 2 + 1
        predictive = scipy.stats.multivariate_t.logpdf(y, np.zeros(2), scale / free, free)
        return (df + 1, scale + np.outer(y, y)), predictive

    def mean(self, law):
        mean = law[1] / (law[0] - 3)
        return np.array([mean[0, 0], math.sqrt(2) * mean[0, 1], mean[1, 1]])


KINDS = [Gamma(), Waiting(), Beta(), Dirichlet(), Covariance()]
NAMES = [type(kind).__name__ for kind in KINDS]
FACTORS = (0.9, 0.6, None)  # the third mode begins anew


def filter_of(kind, T, anew, **options):
    dynamics = [Reset(kind.natural(anew)) if f is None else Discount(f) for f in FACTORS]
    return ConjugateFilter(kind.family, transition=torch.tensor(T, dtype=F64), dynamics=dynamics, **options)


def enumerated(kind, T, pi, laws, anew, ys):
    """Log likelihood, log probabilities of the last mode and mean, over all histories."""
    total, by_mode, means = [], [], []
    k = len(FACTORS)
    for history in itertools.product(range(k), repeat=len(ys) + 1):
        law, logarithm = laws[history[0]], math.log(pi[history[0]])
        for y, before, now in zip(ys, history, history[1:], strict=False):
            law = anew if FACTORS[now] is None else kind.discounted(law, FACTORS[now])
            logarithm += math.log(T[before, now])
            if y is not None:
                law, likelihood = kind.updated(law, y)
                logarithm += likelihood
        total.append(logarithm)
        by_mode.append(history[-1])
        means.append(kind.mean(law))
    total, by_mode = np.array(total), np.array(by_mode)
    evidence = scipy.special.logsumexp(total)
    modes = np.array([scipy.special.logsumexp(total[by_mode == j]) for j in range(k)]) - evidence
    mean = np.exp(total - evidence) @ np.array(means)
    return (torch.as_tensor(np.asarray(x), dtype=F64) for x in (evidence, modes, mean))


def setting(kind, seed, t):
    rng = np.random.default_rng(seed)
    T = rng.dirichlet(np.full(3, 0.7), size=3) + 0.01
    T /= T.sum(1, keepdims=True)
    pi = rng.dirichlet(np.ones(3))
    laws = [kind.draw(rng) for _ in range(3)]
    return T, pi, laws, kind.draw(rng), kind.observations(rng, t)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("t", [1, 3, 6])
def test_a_filter_deeper_than_its_series_is_exact(kind, t):
    T, pi, laws, anew, ys = setting(kind, t, t)
    found = filter_of(kind, T, anew, depth=t + 2).filter(
        torch.tensor(ys, dtype=F64),
        prior=torch.stack([kind.natural(law) for law in laws]),
        log_mode_probability=torch.tensor(pi, dtype=F64).log(),
    )
    evidence, modes, mean = enumerated(kind, T, pi, laws, anew, list(ys))
    close(found.log_likelihood, evidence, 1 + evidence.abs())
    close(found.log_mode_probability[-1], modes, 1 + evidence.abs())
    close(found.mean[-1], mean, 1 + mean.abs().max())


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_gpb2_is_exact_for_one_step_and_gpb1_and_imm_from_one_law(kind):
    T, pi, laws, anew, ys = setting(kind, 7, 1)
    y, log_pi = torch.tensor(ys, dtype=F64), torch.tensor(pi, dtype=F64).log()
    several, one = torch.stack([kind.natural(law) for law in laws]), kind.natural(laws[0])
    cases = [({"depth": 2}, several, laws), ({"depth": 1}, one, laws[:1] * 3), ({"method": "imm"}, one, laws[:1] * 3)]
    for options, prior, known in cases:
        found = filter_of(kind, T, anew, **options).filter(y, prior=prior, log_mode_probability=log_pi)
        evidence, modes, mean = enumerated(kind, T, pi, known, anew, list(ys))
        close(found.log_likelihood, evidence, 1 + evidence.abs(), tolerance=1e-11)
        close(found.log_mode_probability[-1], modes, 1 + evidence.abs(), tolerance=1e-11)
        close(found.mean[-1], mean, 1 + mean.abs().max(), tolerance=1e-11)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_what_is_missing_is_summed_out(kind):
    T, pi, laws, anew, ys = setting(kind, 3, 4)
    y = torch.tensor(ys, dtype=F64)
    y[1] = torch.nan
    mask = torch.tensor([True, True, False, True])
    found = filter_of(kind, T, anew, depth=6).filter(
        Series(y, mask=mask),
        prior=torch.stack([kind.natural(law) for law in laws]),
        log_mode_probability=torch.tensor(pi, dtype=F64).log(),
    )
    evidence, modes, mean = enumerated(kind, T, pi, laws, anew, [ys[0], None, None, ys[3]])
    close(found.log_likelihood, evidence, 1 + evidence.abs())
    close(found.log_mode_probability[-1], modes, 1 + evidence.abs())
    close(found.mean[-1], mean, 1 + mean.abs().max())
    close(found.step_log_likelihood[1:3], torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("options", [{"depth": 2}, {"method": "imm"}], ids=["gpb2", "imm"])
def test_modes_that_never_switch_are_weighed_by_their_evidence(kind, options):
    _, pi, laws, anew, ys = setting(kind, 11, 5)
    never = np.eye(3)
    found = filter_of(kind, never, anew, **options).filter(
        torch.tensor(ys, dtype=F64),
        prior=torch.stack([kind.natural(law) for law in laws]),
        log_mode_probability=torch.tensor(pi, dtype=F64).log(),
    )
    scores, means = [], []
    for factor, p, begun in zip(FACTORS, pi, laws, strict=True):
        law, logarithm = begun, math.log(p)
        for y in ys:
            law, likelihood = kind.updated(anew if factor is None else kind.discounted(law, factor), y)
            logarithm += likelihood
        scores.append(logarithm)
        means.append(kind.mean(law))
    evidence = scipy.special.logsumexp(scores)
    close(found.log_likelihood, torch.tensor(evidence, dtype=F64), 1 + abs(evidence), tolerance=1e-11)
    close(
        found.log_mode_probability[-1], torch.tensor(scores - evidence, dtype=F64), 1 + abs(evidence), tolerance=1e-11
    )
    means = torch.tensor(np.array(means), dtype=F64)
    close(found.mode_mean[-1], means, 1 + means.abs().max(), tolerance=1e-10)


@pytest.mark.parametrize("method", ["gpb1", "gpb2", "gpb3", "imm"])
def test_gaussian_conjugate_filters_are_the_kalman_based_ones(method):
    torch.manual_seed(5)
    model, start = system(3, 2, 2, transition=chain(3)), beginning(3, 2)
    y = observed(model, 12, 4)
    y[0, 3] = torch.nan
    y[1, 5, 0] = torch.nan
    family = LinearGaussian(model.H, model.R, model.d)
    dynamics = [LinearMotion(F, b, Q) for F, b, Q in zip(model.F, model.b, model.Q, strict=True)]
    options = {"method": "imm"} if method == "imm" else {"depth": int(method[-1])}
    ours = ConjugateFilter(family, transition=model.transition, dynamics=dynamics, **options).filter(
        y,
        prior=family.prior(start.mean, start.covariance),
        log_mode_probability=start.log_mode_probability,
    )
    known = {"gpb1": gpb1, "gpb2": gpb2, "imm": imm, "gpb3": lambda *a, **o: gpb(*a, depth=3, **o)}[method]
    theirs = known(model, y, start)
    for name in ("mean", "mode_mean", "log_mode_probability", "predicted_mean", "predicted_log_mode_probability"):
        want = getattr(theirs, name)
        close(getattr(ours, name), want, 1 + want.abs().max(), tolerance=1e-11)
    variance = theirs.covariance.diagonal(dim1=-2, dim2=-1)
    close(ours.variance, variance, 1 + variance.max(), tolerance=1e-11)
    for name in ("mode_log_likelihood", "step_log_likelihood", "log_likelihood"):
        want = getattr(theirs, name)
        close(getattr(ours, name), want, 1 + want.abs().max(), tolerance=1e-11)
    P = theirs.mode_covariance
    found = family.parameters(ours.natural)
    close(found.covariance, P, 1 + P.abs().max(), tolerance=1e-10)


def test_variances_of_covariances_are_those_of_draws():
    """Inverse Wishart: scipy's draws, 400 000 of them."""
    kind = Covariance()
    law = (9.0, np.array([[2.0, 0.6], [0.6, 1.0]]))
    draws = scipy.stats.invwishart.rvs(*law, size=400_000, random_state=np.random.default_rng(0))
    mean, variance = kind.family.moments(kind.natural(law))
    sampled = draws.var(0)
    close(smat(mean), torch.tensor(draws.mean(0), dtype=F64), 1.0, tolerance=5e-3)
    want = torch.tensor([sampled[0, 0], 2 * sampled[0, 1], sampled[1, 1]], dtype=F64)
    close(variance, want, want, tolerance=0.05)
