"""Modes of unequal sizes: what a mode lacks is 0, or comes from the modes that have it.   [yuan12; granstrom15]"""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.autograd import gradcheck
from torch.utils._pytree import tree_map

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, gpb1, gpb2, imm
from gradlogz.filters import Filtered, Generator, constant_acceleration, constant_velocity, enumerate_modes
from gradlogz.filters.moment_matching import fill
from support.scales import close
from support.switching_oracles import F64, chain, observed, positive, same

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
COMPONENTS = ((0, 2), (0, 1, 2), (1, 3))  # neither in order nor one inside the other


def kalman(s, o=2):
    return KalmanModel(
        F=0.7 * torch.randn(s, s, dtype=F64),
        Q=positive(s),
        H=torch.randn(o, s, dtype=F64),
        R=positive(o, scale=0.5),
        b=torch.randn(s, dtype=F64),
        d=torch.randn(o, dtype=F64),
    )


def models(components=COMPONENTS):
    return [kalman(len(own)) for own in components]


def beginning(components=COMPONENTS):
    """A belief of each mode about what it has, as its own numbers and in the whole state."""
    k, s = len(components), 1 + max(c for own in components for c in own)
    own = [(torch.randn(len(c), dtype=F64), positive(len(c))) for c in components]
    mean, covariance = torch.zeros(k, s, dtype=F64), torch.zeros(k, s, s, dtype=F64)
    for j, (c, (m, P)) in enumerate(zip(components, own, strict=True)):
        mean[j, list(c)] = m
        covariance[j][np.ix_(c, c)] = P
    log_pi = torch.randn(k, dtype=F64).log_softmax(-1)
    return own, Prior(mean, covariance, log_pi)


def run(model, method, y, start, **more):
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(y, **more), start)


def augmented(parts, T, components=COMPONENTS):
    """The same modes in the whole state, what they lack set to 0 at each step: written out entry by entry."""
    s = 1 + max(c for own in components for c in own)
    F, Q = np.zeros((len(parts), s, s)), np.zeros((len(parts), s, s))
    H, b = np.zeros((len(parts), 2, s)), np.zeros((len(parts), s))
    for j, (m, own) in enumerate(zip(parts, components, strict=True)):
        for row, c in enumerate(own):
            b[j, c] = m.b[row]
            H[j, :, c] = m.H[:, row]
            for column, e in enumerate(own):
                F[j, c, e], Q[j, c, e] = m.F[row, column], m.Q[row, column]
    R, d = torch.stack([m.R for m in parts]), torch.stack([m.d for m in parts])
    return SwitchingModel(T, *map(torch.as_tensor, (F, Q, H)), R, torch.as_tensor(b), d)


@each
def test_filled_with_zero_they_are_an_augmented_model(method):
    parts, T = models(), chain(3)
    model, whole = SwitchingModel.of(parts, transition=T, components=COMPONENTS, fill="zero"), augmented(parts, T)
    _, start = beginning()
    y = observed(model, 5)
    same(run(model, method, y, start), run(whole, method, y, start))


def test_filled_with_zero_enumeration_is_that_of_the_augmented_model():
    """And gpb2 is exact for one step, as of every model."""
    parts, T = models(), chain(3)
    model, whole = SwitchingModel.of(parts, transition=T, components=COMPONENTS, fill="zero"), augmented(parts, T)
    _, start = beginning()
    y = observed(model, 4)
    true = enumerate_modes(whole, y, start).filtered
    same(enumerate_modes(model, y, start).filtered, true)
    same(gpb2(model, y[:1], start), enumerate_modes(whole, y[:1], start).filtered)
    near, far = ((f(model, y, start).mean - true.mean)[-1].norm() for f in (gpb2, gpb1))
    assert near < far


@pytest.mark.parametrize("fill", ["modes", "zero"])
@pytest.mark.parametrize("method", [METHODS["gpb2"], METHODS["imm"]], ids=["gpb2", "imm"])
def test_modes_that_never_switch_are_a_bank_of_kalman_filters_of_their_own_sizes(method, fill):
    parts = models()
    model = SwitchingModel.of(parts, transition=torch.eye(3, dtype=F64), components=COMPONENTS, fill=fill)
    own, start = beginning()
    y = observed(model, 5)
    found = run(model, method, y, start)
    one = torch.ones(1, 1, dtype=F64)
    logs = start.log_mode_probability.clone()
    for j, (part, (m, P), c) in enumerate(zip(parts, own, COMPONENTS, strict=True)):
        alone = imm(SwitchingModel.of([part], transition=one), y, Prior(m, P))
        close(found.mode_mean[:, j, list(c)], alone.mean, 100.0)
        close(found.mode_covariance[:, j][:, list(c)][:, :, list(c)], alone.covariance, 100.0)
        lacks = [e for e in range(4) if e not in c]
        assert not found.mode_mean[:, j, lacks].any()
        assert not found.mode_covariance[:, j, lacks].any()
        logs[j] += alone.log_likelihood
    close(found.log_mode_probability[-1], logs.log_softmax(-1), 100.0)


def unbiased(mu, m1, P1, m2, P2, shared):
    """The mixed state of the larger of two modes as [yuan12] has it: the smaller one with the extra part of the other.

    x1 = (x1, extra of m2), P1 = diag(P1, extra of P2), then mean and covariance of the mixture.
    """
    extra = [c for c in range(len(m2)) if c not in shared]
    x, P = m2.copy(), np.zeros_like(P2)
    x[shared] = m1
    P[np.ix_(shared, shared)] = P1
    P[np.ix_(extra, extra)] = P2[np.ix_(extra, extra)]
    m = mu[0] * x + mu[1] * m2
    return m, sum(w * (C + np.outer(a - m, a - m)) for w, a, C in ((mu[0], x, P), (mu[1], m2, P2)))


def test_imm_mixes_velocity_and_acceleration_as_published():
    """Constant velocity of 4 components beside constant acceleration of 6."""
    noise = {"dt": 0.5, "spectral_density": 0.2, "observation_variance": 0.3, "dtype": F64}
    parts = [constant_velocity(2, **noise), constant_acceleration(2, **noise)]
    components, T = ((0, 1, 3, 4), tuple(range(6))), chain(2)
    model = SwitchingModel.of(parts, transition=T, components=components)
    own, start = beginning(components)
    y = observed(model, 1)
    found = imm(model, y, start)
    (m1, P1), (m2, P2) = ((m.numpy(), P.numpy()) for m, P in own)
    mu = start.log_mode_probability.exp().numpy()[:, None] * T.numpy()
    mu = mu / mu.sum(0)
    shared = list(components[0])
    m0, P0 = unbiased(mu[:, 1], m1, P1, m2, P2, shared)
    F, Q = parts[1].F.numpy(), parts[1].Q.numpy()
    close(found.predicted_mode_mean[0, 1], torch.as_tensor(F @ m0), 10.0)
    close(found.predicted_mode_covariance[0, 1], torch.as_tensor(F @ P0 @ F.T + Q), 100.0)
    # The smaller one takes from the larger what it has a place for.
    m = mu[0, 0] * m1 + mu[1, 0] * m2[shared]
    P = mu[0, 0] * (P1 + np.outer(m1 - m, m1 - m))
    P += mu[1, 0] * (P2[np.ix_(shared, shared)] + np.outer(m2[shared] - m, m2[shared] - m))
    F, Q = parts[0].F.numpy(), parts[0].Q.numpy()
    close(found.predicted_mode_mean[0, 0, shared], torch.as_tensor(F @ m), 10.0)
    close(found.predicted_mode_covariance[0, 0][shared][:, shared], torch.as_tensor(F @ P @ F.T + Q), 100.0)


def by_pairs(parts, T, own, start, y, components=COMPONENTS):
    """One step of a filled model by every pair of modes, in numpy: fill, predict, update, and Bayes' rule."""
    k, s = len(parts), 4
    pi = start.log_mode_probability.exp().numpy()
    rows = []
    for j in range(k):
        w = pi * T.numpy()[:, j]
        for i in range(k):
            x, P = np.zeros(s), np.zeros((s, s))
            x[list(components[i])] = own[i][0]
            P[np.ix_(components[i], components[i])] = own[i][1]
            lacks = [c for c in range(s) if c not in components[i]]
            for c in lacks:  # what each component is among those that have it
                donors = [n for n in range(k) if c in components[n]]
                W = sum(w[n] for n in donors)
                at = {n: components[n].index(c) for n in donors}
                x[c] = sum(w[n] * float(own[n][0][at[n]]) for n in donors) / W
            for c in lacks:
                for e in lacks:
                    W = [sum(w[n] for n in range(k) if f in components[n]) for f in (c, e)]
                    for n in range(k):
                        if c in components[n] and e in components[n]:
                            p, q = components[n].index(c), components[n].index(e)
                            second = float(own[n][1][p, q])
                            second += (float(own[n][0][p]) - x[c]) * (float(own[n][0][q]) - x[e])
                            P[c, e] += w[n] * second / math.sqrt(W[0] * W[1])
            assert np.linalg.eigvalsh(P).min() > -1e-12
            c = list(components[j])
            F, Q, H, R, b, d = (getattr(parts[j], n).numpy() for n in ("F", "Q", "H", "R", "b", "d"))
            x, P = F @ x[c] + b, F @ P[np.ix_(c, c)] @ F.T + Q
            S, v = H @ P @ H.T + R, y - H @ x - d
            K = P @ H.T @ np.linalg.inv(S)
            log = math.log(pi[i] * T[i, j]) + scipy.stats.multivariate_normal.logpdf(v, np.zeros(2), S)
            rows.append((j, log, x + K @ v, P - K @ S @ K.T))
    return rows


def test_gpb2_weighs_every_pair_of_modes_after_filling():
    parts, T = models(), chain(3)
    model = SwitchingModel.of(parts, transition=T, components=COMPONENTS)
    own, start = beginning()
    y = observed(model, 1)
    found = gpb2(model, y, start)
    rows = by_pairs(parts, T, own, start, y[0].numpy())
    close(found.log_likelihood, torch.tensor(scipy.special.logsumexp([r[1] for r in rows]), dtype=F64), 100.0)
    for j, c in enumerate(COMPONENTS):
        mine = [r for r in rows if r[0] == j]
        w = scipy.special.softmax([r[1] for r in mine])
        m = sum(a * r[2] for a, r in zip(w, mine, strict=True))
        P = sum(a * (r[3] + np.outer(r[2] - m, r[2] - m)) for a, r in zip(w, mine, strict=True))
        close(found.mode_mean[0, j, list(c)], torch.as_tensor(m), 10.0)
        close(found.mode_covariance[0, j][list(c)][:, list(c)], torch.as_tensor(P), 100.0)


def test_without_an_observation_imm_and_gpb2_agree_for_one_step():
    """Collapsing commutes with moving, whatever was filled in."""
    model = SwitchingModel.of(models(), transition=chain(3), components=COMPONENTS)
    _, start = beginning()
    y = torch.full((1, 2), torch.nan, dtype=F64)
    same(imm(model, y, start), gpb2(model, y, start))


def test_what_is_reported_of_a_component_is_what_those_say_that_have_it():
    model = SwitchingModel.of(models(), transition=chain(3), components=COMPONENTS)
    _, start = beginning()
    found = imm(model, observed(model, 4), start)
    pi = found.log_mode_probability.exp()
    for c in range(4):
        has = [j for j in range(3) if c in COMPONENTS[j]]
        w = pi[:, has] / pi[:, has].sum(-1, keepdim=True)
        m = found.mode_mean[:, has, c]
        mean = (w * m).sum(-1)
        spread = (w * (found.mode_covariance[:, has, c, c] + (m - mean.unsqueeze(-1)) ** 2)).sum(-1)
        close(found.mean[:, c], mean, 10.0)
        if len(has) == 1:
            close(found.covariance[:, c, c], spread, 100.0)


@each
def test_models_that_have_everything_are_as_before(method):
    parts, T = [kalman(3), kalman(3)], chain(2)
    every = (tuple(range(3)),) * 2
    _, start = beginning(every)
    plain = SwitchingModel.of(parts, transition=T)
    y = observed(plain, 4)
    same(run(SwitchingModel.of(parts, transition=T, components=every), method, y, start), run(plain, method, y, start))
    # In another order, as one mode may list its components.
    turned = [parts[0], _turned(parts[1], [2, 0, 1])]
    mixed = SwitchingModel.of(turned, transition=T, components=((0, 1, 2), (2, 0, 1)))
    same(run(mixed, method, y, start), run(plain, method, y, start), 10.0)


def _turned(m, order):
    return m._replace(F=m.F[order][:, order], Q=m.Q[order][:, order], H=m.H[:, order], b=m.b[order])


@each
@pytest.mark.parametrize("fill", ["modes", "zero"])
def test_covariances_are_covariances_and_targets_do_not_see_each_other(method, fill):
    model = SwitchingModel.of(models(), transition=chain(3), components=COMPONENTS, fill=fill)
    starts = [beginning()[1] for _ in range(3)]
    start = tree_map(lambda *parts: torch.stack(parts), *starts)
    y = observed(model, 12, 3)
    y[0, 3], y[1, 2, 0] = torch.nan, torch.nan
    found = run(model, method, y, start)
    for name in Filtered._fields:
        if name.endswith("covariance"):
            P = getattr(found, name)
            assert torch.equal(P, P.mT), name
            assert (torch.linalg.eigvalsh(P) > -1e-12 * P.abs().amax()).all(), name
    for i in range(3):
        same(Filtered(*(part[i] for part in found)), run(model, method, y[i], starts[i]), 10.0)


def test_what_is_filled_in_is_a_covariance_however_components_overlap():
    has = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=torch.bool)
    own = has.double()
    P = positive(50, 4, 4) * own.unsqueeze(-1) * own.unsqueeze(-2)
    share = torch.randn(50, 2, 4, dtype=F64).mul(3).softmax(-1)
    share[:25, 0] = torch.tensor([1.0, 0, 0, 0], dtype=F64)  # components that none has who has a share
    _, filled = fill(share, 5 * torch.randn(50, 4, 4, dtype=F64) * own, P, has)
    assert (torch.linalg.eigvalsh(filled) > 0).all()


def test_unequal_sizes_in_continuous_time_are_those_of_steps():
    noise = {"spectral_density": 0.2, "observation_variance": 0.3, "dtype": F64}
    components = ((0, 1), (0, 1, 2))
    G = torch.tensor([[-0.3, 0.3], [0.7, -0.7]], dtype=F64)
    flow = [constant_velocity(1, **noise), constant_acceleration(1, **noise)]
    step = [constant_velocity(1, dt=0.5, **noise), constant_acceleration(1, dt=0.5, **noise)]
    continuous = SwitchingModel.of(flow, transition=Generator(G), components=components)
    discrete = SwitchingModel.of(step, transition=torch.linalg.matrix_exp(0.5 * G), components=components)
    _, start = beginning(components)
    y, times = observed(discrete, 6), 0.5 * torch.arange(1, 7, dtype=F64)
    same(imm(continuous, Series(y, times=times), start), imm(discrete, y, start), 10.0)


@each
def test_derivatives_pass_through_what_is_filled_in(method):
    parts, T = models(), chain(3)
    _, start = beginning()
    model = SwitchingModel.of(parts, transition=T, components=COMPONENTS)
    y = observed(model, 3)
    leaves = [t.clone().requires_grad_() for t in (T, model.F, model.Q, start.mean, start.covariance)]

    def projected(T, F, Q, mean, covariance):
        changed = SwitchingModel(T, F, Q, model.H, model.R, model.b, model.d, components=COMPONENTS, validate=False)
        begins = Prior(mean, covariance, start.log_mode_probability)
        found = run(changed, method, y, begins)
        return found.log_likelihood, found.mean.sum(), (found.covariance[-1] * model.Q[0]).sum()

    assert gradcheck(projected, leaves, fast_mode=True)
    never = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], dtype=F64).requires_grad_()
    out = projected(never, *leaves[1:])
    assert all(g.isfinite().all() for g in torch.autograd.grad(sum(out), [never, *leaves[1:]]))


def test_vmap_over_models_of_unequal_sizes_is_a_loop():
    each_of = [SwitchingModel.of(models(), transition=chain(3), components=COMPONENTS) for _ in range(3)]
    _, start = beginning()
    y = observed(each_of[0], 3)
    names = ("transition", "F", "Q", "H", "R", "b", "d")
    stacked = {n: torch.stack([getattr(m, n) for m in each_of]) for n in names}
    mapped = torch.func.vmap(lambda f: imm(SwitchingModel(**f, components=COMPONENTS), y, start).log_likelihood)
    close(mapped(stacked), torch.stack([imm(m, y, start).log_likelihood for m in each_of]), 100.0)
