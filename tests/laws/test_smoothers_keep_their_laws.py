"""What holds for every smoother: batches, gaps, order, symmetry, dead modes, sums of pairs, derivatives."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from gradlogz import Prior, Series, SwitchingModel, imm, smooth
from gradlogz.filters import Generator, Smoothed, constant_acceleration, constant_velocity, nees
from gradlogz.kernels.filters import dispatch
from support.scales import close
from support.smoother_oracles import drawn
from support.switching_oracles import F64, beginning, chain, observed, positive, system

METHODS = ("imm", "gpb2", "kim")
each = pytest.mark.parametrize("method", METHODS)
ours = pytest.mark.parametrize("method", ["imm", "gpb2"])
NAMES = ("transition", "F", "Q", "H", "R", "b", "d", "B", "D", "y", "u", "mean", "covariance", "log_mode_probability")


@pytest.fixture(autouse=True, params=[0, math.inf], ids=["compiled", "torch"])
def path(monkeypatch, request):
    """Run every law by the compiled kernels, where they apply, and by the torch path."""
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", request.param)


def alike(found, expected, scale=10.0, *, tolerance=None):
    for name, a, e in zip(Smoothed._fields[:-1], found[:-1], expected[:-1], strict=True):
        size = scale * (1 + float(e[e.isfinite()].abs().max()))
        torch.testing.assert_close(a, e, rtol=0, atol=(tolerance or 1e-12) * size, msg=lambda m, n=name: f"{n}: {m}")


def at(found, index):
    return Smoothed(*(part[index] for part in found[:-1]), found.filtered)


@pytest.mark.parametrize("method", [*METHODS, "enumerate"])
def test_targets_do_not_see_each_other(method):
    model, k, s = system(2, 2, 2), 2, 2
    start = Prior(
        torch.randn(2, 3, k, s, dtype=F64), positive(2, 1, k, s), torch.randn(1, 3, k, dtype=F64).log_softmax(-1)
    )
    y = observed(model, 4, 2, 3)
    y[0, 0, 2] = y[1, 2, 3, 0] = torch.nan
    found = smooth(model, y, start, method=method)
    assert found.log_pair_probability.shape == (2, 3, 4, k, k)
    assert found.lag_covariance.shape == (2, 3, 4, k, s, s)
    assert found.initial_log_mode_probability.shape == (2, 3, k)
    for i, j in ((0, 0), (1, 2)):
        alone = Prior(start.mean[i, j], start.covariance[i, 0], start.log_mode_probability[0, j])
        alike(at(found, (i, j)), smooth(model, y[i, j], alone, method=method))


@pytest.mark.parametrize("method", [*METHODS, "enumerate"])
def test_models_that_differ_between_targets_are_many_models(method):
    n, steps = 2, 4
    T = torch.stack([chain(2) for _ in range(n)]).unsqueeze(1)
    model = system(2, lead=(n, steps), transition=T)
    y, start = observed(model, steps, n), beginning(2)
    found = smooth(model, y, start, method=method)
    for i in range(n):
        fields = {f: getattr(model, f)[i] for f in ("F", "Q", "H", "R", "b", "d")}
        alike(at(found, i), smooth(SwitchingModel(T[i, 0], **fields), y[i], start, method=method))


@each
@pytest.mark.parametrize("lag", [None, 2])
def test_masks_gaps_and_lengths_say_the_same(method, lag):
    model, start = system(2), beginning(2)
    y = observed(model, 5, 3)
    lengths = torch.tensor([5, 2, 0])
    inside = torch.arange(5) < lengths[:, None]
    by_gap = smooth(model, y.masked_fill(~inside.unsqueeze(-1), torch.nan), start, method=method, lag=lag)
    alike(smooth(model, Series(y, lengths=lengths), start, method=method, lag=lag), by_gap)
    alike(smooth(model, Series(y, mask=inside), start, method=method, lag=lag), by_gap)


@ours
def test_what_is_not_observed_says_nothing_of_what_was(method):
    """Of a series cut short, earlier times are those of the short series."""
    model, start = system(2), beginning(2)
    y = observed(model, 6)
    short = smooth(model, y[:3], start, method=method)
    long = smooth(model, y.masked_fill((torch.arange(6) > 2)[:, None], torch.nan), start, method=method)
    for name in Smoothed._fields[:9]:
        e = getattr(short, name)
        close(getattr(long, name)[:3], e, 100 * (1 + e.abs().amax()))


@each
def test_the_order_of_modes_does_not_matter(method):
    model, start = system(3), beginning(3)
    y, order = observed(model, 4), torch.tensor([2, 0, 1])
    fields = {f: getattr(model, f)[order] for f in ("F", "Q", "H", "R", "b", "d")}
    turned = SwitchingModel(model.transition[order][:, order], **fields)
    found = smooth(turned, y, tree_map(lambda value: value[order], start), method=method)
    expected = smooth(model, y, start, method=method)
    close(found.mean, expected.mean, 100.0)
    close(found.covariance, expected.covariance, 100 * (1 + expected.covariance.abs().amax()))
    close(found.log_pair_probability, expected.log_pair_probability[:, order][:, :, order], 1e3)
    close(found.lag_covariance, expected.lag_covariance[:, order], 100 * (1 + expected.lag_covariance.abs().amax()))


@each
def test_probabilities_of_pairs_are_those_of_modes_and_covariances_are_covariances(method):
    model, start = system(3, 3, 2), beginning(3, 3)
    found = smooth(model, observed(model, 20), start, method=method)
    close(found.log_pair_probability.logsumexp(-2), found.log_mode_probability, 1e3)
    close(found.log_mode_probability.exp().sum(-1), torch.ones(20, dtype=F64))
    close(found.initial_log_mode_probability.exp().sum(), torch.ones((), dtype=F64))
    close(found.log_pair_probability[0].logsumexp(-1), found.initial_log_mode_probability, 1e3)
    above = torch.cat((found.mode_covariance, found.lag_covariance), -1)
    below = torch.cat((found.lag_covariance.mT, found.previous_covariance), -1)
    joint = torch.cat((above, below), -2)
    for P in (found.covariance, found.mode_covariance, found.initial_mode_covariance, joint):
        assert torch.equal(P, P.mT)
        assert (torch.linalg.eigvalsh(P)[..., 0] > 0).all()


def tracking(variance=0.01):
    """A model of motion that switches between velocity and acceleration, and how it begins."""
    options = {"dt": 0.1, "observation_variance": variance, "dtype": F64}
    slow = constant_velocity(2, spectral_density=0.01, derivatives=3, **options)
    model = SwitchingModel.of(
        [slow, constant_acceleration(2, spectral_density=1.0, **options)],
        transition=torch.tensor([[0.97, 0.03], [0.1, 0.9]], dtype=F64),
    )
    return model, Prior(torch.zeros(6, dtype=F64), torch.eye(6, dtype=F64))


@ours
def test_smoothing_brings_states_nearer_than_filtering_and_a_lag_half_way(method):
    model, start = tracking()
    x, _, y = drawn(model, start, 40, 60)

    def error(found):
        return float((found.mean[..., [0, 3]] - x[..., [0, 3]]).square().mean().sqrt())

    whole = smooth(model, y, start, method=method)
    lags = [error(smooth(model, y, start, method=method, lag=lag)) for lag in (1, 4, 12)]
    assert error(whole) < 0.8 * error(whole.filtered)
    assert error(whole.filtered) > lags[0] > lags[1] > error(whole)
    assert lags[2] < 1.05 * error(whole)


@ours
@pytest.mark.parametrize("prior", [1.0, 1e4])
def test_vague_beginnings_and_modes_without_noise_leave_covariances_positive(method, prior):
    """Accelerations that a mode holds at 0; beliefs 1e10 times wider than what is observed."""
    model, start = tracking(1e-6)
    start = replace(start, covariance=prior * start.covariance)
    found = smooth(model, drawn(model, start, 30, 20)[2], start, method=method)
    for P in (found.covariance, found.mode_covariance):
        values = torch.linalg.eigvalsh(P)
        assert (values[..., 0] >= -1e-14 * values[..., -1]).all()  # some are 0
    assert all(part.isfinite().all() for part in found[:4])


def test_the_nees_of_a_smoother_is_that_of_its_model():
    """States drawn from the model of one mode: chi-square, as for the filter."""
    model, start = system(1, 2, 1), beginning(1, shared=True)
    x, _, y = drawn(model, start, 4, 400)
    found = smooth(model, y, Prior(start.mean, start.covariance))
    average = nees(found, x, level=0.9999)
    for t in range(4):
        assert bool(type(average)(*(part[:, t] for part in average[:4]), average.level).mean().holds)


def test_modes_that_cannot_be_are_never_and_harm_nothing():
    """Mode 0 is left for good, mode 2 is never entered."""
    T = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], dtype=F64)
    model, start = system(3, transition=T), beginning(3)
    start = replace(start, log_mode_probability=torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64))
    y = observed(model, 4)
    only = {f: getattr(model, f)[1:2] for f in ("F", "Q", "H", "R", "b", "d")}
    alone = SwitchingModel(torch.ones(1, 1, dtype=F64), **only)
    expected = smooth(alone, y, Prior(start.mean[0], start.covariance[0]))
    for method in METHODS:
        found = smooth(model, y, start, method=method)
        assert torch.equal(found.log_mode_probability.exp(), torch.tensor([[0.0, 1.0, 0.0]], dtype=F64).expand(4, 3))
        assert all(part.isfinite().all() for part in found[:4])
        assert not any(part.isnan().any() for part in found[:-1])
        close(found.mean, expected.mean, 100.0)
        close(found.covariance, expected.covariance, 100.0)


@ours
def test_an_impossible_observation_changes_nothing(method):
    """Its density is 0 in every mode, as far as numbers go."""
    model, start = system(2), beginning(2)
    y = observed(model, 4)
    far, gap = y.clone(), y.clone()
    far[2], gap[2] = 1e200, torch.nan
    found, expected = smooth(model, far, start, method=method), smooth(model, gap, start, method=method)
    close(found.mean, expected.mean, 100.0)
    close(found.log_mode_probability, expected.log_mode_probability, 100.0)


@each
def test_float32_is_float64_rounded(method):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 10)
    fields = {f: getattr(model, f).float() for f in ("transition", "F", "Q", "H", "R", "b", "d")}
    low = smooth(SwitchingModel(**fields), y.float(), tree_map(lambda t: t.float(), start), method=method)
    high = smooth(model, y, start, method=method)
    assert low.mean.dtype == torch.float32
    close(low.mean, high.mean.float(), 30 * (1 + high.mean.abs().amax().float()))


def test_modes_of_unequal_sizes_are_smoothed():
    """A mode that holds its accelerations at 0 by having none, filled with 0, is one that has them and no noise."""
    options = {"dt": 0.5, "observation_variance": 0.3, "dtype": F64}
    slow, fast = (constant_velocity(1, spectral_density=q, **options) for q in (0.1, 1.0))
    third = constant_acceleration(1, spectral_density=1.0, **options)
    T = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.2, 0.2, 0.6]], dtype=F64)
    short = SwitchingModel.of([slow, fast, third], transition=T, components=[(0, 1), (0, 1), (0, 1, 2)], fill="zero")
    padded = [constant_velocity(1, spectral_density=q, derivatives=3, **options) for q in (0.1, 1.0)]
    whole = SwitchingModel.of([*padded, third], transition=T)
    y = torch.tensor([[0.4], [1.1], [2.3], [4.0], [6.5]], dtype=F64)
    P = torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=F64))
    start = Prior(torch.zeros(3, dtype=F64), P)
    for method in ("imm", "gpb2"):
        alike(smooth(short, y, start, method=method), smooth(whole, y, start, method=method))
    filled = SwitchingModel.of([slow, fast, third], transition=T, components=[(0, 1), (0, 1), (0, 1, 2)])
    start = replace(start, covariance=torch.eye(3, dtype=F64))
    found = smooth(filled, y, start, method="imm")
    assert (torch.linalg.eigvalsh(found.covariance)[..., 0] > 0).all()
    assert (found.mode_covariance[:, 0, 2] == 0).all()


def test_times_of_observations_are_steps_of_their_lengths():
    rate = torch.tensor([[-0.3, 0.3], [0.7, -0.7]], dtype=F64)
    modes = [constant_velocity(1, spectral_density=q, observation_variance=0.5, dtype=F64) for q in (0.1, 3.0)]
    model = SwitchingModel.of(modes, transition=Generator(rate))
    times = torch.tensor([0.5, 0.7, 2.0], dtype=F64)
    y, start = torch.randn(3, 1, dtype=F64), Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    steps = model.at(torch.tensor([0.5, 0.2, 1.3], dtype=F64))
    for method in ("imm", "gpb2", "enumerate"):
        alike(smooth(model, Series(y, times=times), start, method=method), smooth(steps, y, start, method=method))


# Derivatives ---------------------------------------------------------------------------------------------------------


def arguments(k=2, s=2, o=1, steps=3):
    model = system(k, s, o, B=torch.randn(k, s, 1, dtype=F64), D=torch.randn(k, o, 1, dtype=F64))
    given = {name: getattr(model, name) for name in NAMES[:9]}
    given |= {"y": observed(model, steps), "u": torch.randn(steps, 1, dtype=F64)}
    given |= dict(zip(NAMES[11:], tree_leaves(beginning(k, s)), strict=True))
    return {name: t.detach().clone().requires_grad_() for name, t in given.items()}


def run(given, **options):
    model = SwitchingModel(**{name: given[name] for name in NAMES[:9]}, validate=False)
    prior = Prior(*(given[name] for name in NAMES[11:]))
    found = smooth(model, Series(given["y"], inputs=given["u"]), prior, **options)
    return found[:-1]


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_components_that_nothing_observes_leave_gradients_right(method):
    """The third component is neither observed nor coupled: later observations have no information about it."""
    F = torch.eye(3, dtype=F64).repeat(2, 1, 1)
    F[:, 0, 1] = 1.0
    H = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64).repeat(2, 1, 1)
    R = torch.tensor([[[1e-3]], [[10.0]]], dtype=F64)
    y = 5 * torch.randn(12, 1, dtype=F64, generator=torch.Generator().manual_seed(0))
    prior = Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))

    def position(q):
        Q = q[:, None, None] * torch.eye(3, dtype=F64)
        model = SwitchingModel(torch.full((2, 2), 0.5, dtype=F64), F, Q, H, R)
        return smooth(model, y, prior, method=method).mean[..., 0].sum()

    gradcheck(position, torch.tensor([1e-2, 1.0], dtype=F64, requires_grad=True), rtol=1e-4)


@pytest.mark.parametrize("options", [{"method": m} for m in (*METHODS, "enumerate")] + [{"lag": 1}], ids=str)
def test_every_output_has_its_derivative_in_every_argument(options):
    given = arguments()
    weights = [torch.randn_like(part) for part in run(given, **options)]

    def projected(*values):
        found = run(dict(zip(NAMES, values, strict=True)), **options)
        return tuple((w * part).sum() for w, part in zip(weights, found, strict=True))

    assert gradcheck(projected, tuple(given[name] for name in NAMES), fast_mode=True)


@ours
def test_gaps_and_dead_modes_leave_gradients_finite(method):
    given = arguments(3, 2, 2, steps=4)
    T = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=F64)  # mode 2 cannot be
    y = given["y"].detach().clone()
    y[1], y[2, 0] = torch.nan, torch.nan
    given = {**given, "transition": T.requires_grad_(), "y": y.requires_grad_()}
    mean, covariance, _, _, log_pi = run(given, method=method)[:5]
    out = mean.sum() + covariance.sum() + log_pi[:, :2].sum()
    for name, slope in zip(NAMES, torch.autograd.grad(out, [given[name] for name in NAMES]), strict=True):
        assert slope.isfinite().all(), name


@each
def test_vmap_is_a_loop(method):
    many = [{name: t.detach() for name, t in arguments().items()} for _ in range(3)]
    stacked = {name: torch.stack([one[name] for one in many]) for name in NAMES}
    mapped = vmap(lambda given: run(given, method=method))(stacked)
    for i, one in enumerate(many):
        for a, e in zip(mapped, run(one, method=method), strict=True):
            close(a[i], e, 100 * (1 + e.abs().amax()))


def test_the_score_of_the_exact_likelihood_is_fisher_s_identity():
    """d log p(y) / d log pi_0 of the first mode is its smoothed probability: E of the complete score."""
    model, start = system(2), beginning(2)
    y = observed(model, 4)

    def likelihood(log_pi):
        changed = replace(start, log_mode_probability=log_pi)
        return smooth(model_of(model), y, changed, method="enumerate").filtered.log_likelihood

    slope = grad(likelihood)(start.log_mode_probability)
    found = smooth(model, y, start, method="enumerate")
    close(slope, found.initial_log_mode_probability.exp(), 100.0)

    def of_chain(T):
        changed = SwitchingModel(T, **{f: getattr(model, f) for f in ("F", "Q", "H", "R", "b", "d")}, validate=False)
        return smooth(changed, y, start, method="enumerate").filtered.log_likelihood

    slope = grad(of_chain)(model.transition)
    close(model.transition * slope, found.log_pair_probability.exp().sum(0), 100.0)  # transitions are counted


def model_of(model):
    """The same without checks, which have no values to look at inside a derivative."""
    return SwitchingModel(
        **{f: getattr(model, f) for f in ("transition", "F", "Q", "H", "R", "b", "d")}, validate=False
    )


def test_the_filter_inside_is_the_filter():
    model, start = system(2), beginning(2)
    y = observed(model, 4)
    found = smooth(model, y, start, method="imm")
    assert torch.equal(found.filtered.mean, imm(model, y, start).mean)


@ours
def test_smoothed_means_are_continuous_in_the_noise(method):
    """Modes that disagree: a quarter of the step in R takes a quarter of the step in the means, without a jump."""
    g = torch.Generator().manual_seed(4)
    y = torch.randn(20, 30, 1, dtype=F64, generator=g).cumsum(1)
    one, T = torch.ones(2, 1, 1, dtype=F64), torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    R = torch.linspace(0.1, 0.5, 401, dtype=F64)[:, None, None, None, None, None] * one
    model = SwitchingModel(T, one, torch.tensor([0.02, 1.0], dtype=F64)[:, None, None], one, R)
    start = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    mean = smooth(model, y.expand(401, -1, -1, -1), start, method=method).mean
    coarse, fine = (float(m.diff(dim=0).abs().max()) for m in (mean[::4], mean))
    assert fine < 0.3 * coarse


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_smoothed_positions_stay_near_turning_targets(method):
    """Modes of nearly no noise and of much: the score of a narrow Gaussian must not carry a wide one away."""
    draw, dt, n = np.random.default_rng(1), 3.0, 60
    heading, place, rate, path = draw.uniform(0, 2 * np.pi, n), np.zeros((n, 2)), np.zeros(n), []
    for _ in range(120):
        rate = np.where(draw.random(n) < 0.03, draw.choice([0, 0, 0.05, -0.05], n), rate)
        for _ in range(10):
            heading = heading + rate * dt / 10
            place = place + 20 * dt * np.stack((np.cos(heading), np.sin(heading)), 1)
        path.append(place)
    truth = torch.from_numpy(np.stack(path, 1))
    y = truth + 50 * torch.from_numpy(draw.normal(size=truth.shape))
    numbers = {"dt": dt, "observation_variance": 2500.0, "dtype": torch.float64}
    modes = [constant_velocity(2, spectral_density=q, **numbers) for q in (1e-4, 400.0)]
    T = torch.tensor([[0.993, 0.007], [0.002, 0.998]], dtype=torch.float64)
    wide = torch.tensor([1e8, 1e5, 1e8, 1e5], dtype=torch.float64).diag()
    smoothed = smooth(SwitchingModel.of(modes, transition=T), y, Prior(wide[0] * 0, wide), method=method)
    error, before = ((m[..., ::2] - truth).norm(dim=-1) for m in (smoothed.mean, smoothed.filtered.mean))
    assert float(error.max()) < 250  # five standard deviations of a detection
    assert float(error.square().mean()) < 0.5 * float(before.square().mean())
