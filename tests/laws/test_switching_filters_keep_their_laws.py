"""What holds for every switching filter: batches, order, gaps, time, symmetry, modes that cannot be.   [theory 7.4]"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.utils._pytree import tree_map

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel, gpb1, gpb2, imm
from gradlogz.filters import Filtered, constant_velocity, coordinated_turn, enumerate_modes
from gradlogz.kernels.filters import dispatch
from support.scales import close
from support.switching_oracles import F64, beginning, chain, observed, positive, same, system

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def filter_of(model, method):
    return SwitchingFilter(model, method[0], depth=method[1])


def at(found, index):
    """The result of one target."""
    return Filtered(*(part[index] for part in found))


@each
def test_targets_do_not_see_each_other(method):
    model, k, s = system(3, 2, 2), 3, 2
    start = Prior(
        torch.randn(4, 5, k, s, dtype=F64), positive(4, 1, k, s), torch.randn(1, 5, k, dtype=F64).log_softmax(-1)
    )
    y = observed(model, 6, 4, 5)
    y[0, 0, 2] = y[1, 3, 4, 0] = torch.nan
    found = filter_of(model, method).filter(y, start)
    assert found.mean.shape == (4, 5, 6, s)
    assert found.mode_innovation_covariance.shape == (4, 5, 6, k, 2, 2)
    assert found.log_likelihood.shape == (4, 5)
    for i, j in ((0, 0), (1, 3), (3, 4)):
        alone = Prior(start.mean[i, j], start.covariance[i, 0], start.log_mode_probability[0, j])
        same(at(found, (i, j)), filter_of(model, method).filter(y[i, j], alone))


@each
def test_models_that_differ_between_targets_are_many_models(method):
    n, steps = 3, 5
    T = torch.stack([chain(2) for _ in range(n)]).unsqueeze(1)
    model = system(2, lead=(n, steps), transition=T)
    y, start = observed(model, steps, n), beginning(2)
    found = filter_of(model, method).filter(y, start)
    for i in range(n):
        fields = {f: getattr(model, f)[i] for f in ("F", "Q", "H", "R", "b", "d")}
        alone = SwitchingModel(T[i, 0], **fields)
        same(at(found, i), filter_of(alone, method).filter(y[i], start))


@each
def test_one_step_after_the_other_is_the_series(method):
    steps = 6
    model = system(2, lead=(steps,), B=torch.randn(2, 2, 3, dtype=F64), D=torch.randn(steps, 2, 2, 3, dtype=F64))
    y, u, start = observed(model, steps, 4), torch.randn(4, steps, 3, dtype=F64), beginning(2)
    y[0, 1], y[1, 2, 0] = torch.nan, torch.nan
    online = filter_of(model, method)
    whole = online.filter(Series(y, inputs=u), start)
    state = online.init(start, batch_shape=(4,))
    for t in range(steps):
        state, found = online.step(state, y[:, t], inputs=u[:, t], time=t)
        now = Filtered(*(part[:, t] for part in whole[:-1]), whole.step_log_likelihood[:, : t + 1].sum(-1))
        same(found, now)
    close(state.log_likelihood, whole.log_likelihood, 100.0)


@each
def test_the_order_of_modes_does_not_matter(method):
    k = 3
    model, start = system(k), beginning(k)
    y, order = observed(model, 5), torch.tensor([2, 0, 1])
    fields = {f: getattr(model, f)[order] for f in ("F", "Q", "H", "R", "b", "d")}
    turned = SwitchingModel(model.transition[order][:, order], **fields)
    other = tree_map(lambda value: value[order], start)
    found, expected = filter_of(turned, method).filter(y, other), filter_of(model, method).filter(y, start)
    of_modes = {f for f in Filtered._fields if "mode_" in f}
    same(found, Filtered(**{f: v[:, order] if f in of_modes else v for f, v in expected._asdict().items()}), 10.0)


@pytest.mark.parametrize("method", [METHODS["gpb2"], METHODS["imm"]], ids=["gpb2", "imm"])
def test_a_mode_that_is_there_twice_is_one_mode(method):
    """The second copy takes half of every transition to the first; the copies agree, so that nothing is lost."""
    model, start = system(2), beginning(2)
    y, twice = observed(model, 5), torch.tensor([0, 1, 1])
    T = model.transition[twice][:, twice] * torch.tensor([1.0, 0.3, 0.7], dtype=F64)
    copied = SwitchingModel(T, **{f: getattr(model, f)[twice] for f in ("F", "Q", "H", "R", "b", "d")})
    other = tree_map(lambda value: value[twice], start)
    halved = other.log_mode_probability + torch.tensor([1.0, 0.5, 0.5], dtype=F64).log()
    other = replace(other, log_mode_probability=halved)
    found, expected = filter_of(copied, method).filter(y, other), filter_of(model, method).filter(y, start)
    for name in ("mean", "covariance", "innovation", "innovation_covariance", "step_log_likelihood", "log_likelihood"):
        e = getattr(expected, name)
        close(getattr(found, name), e, 10 * (1 + e.abs().amax()))


@each
def test_a_gap_in_a_dimension_is_a_sensor_that_is_not_there(method):
    model, start = system(3, 2, 3), beginning(3)
    y = observed(model, 5)
    y[:, 1] = torch.nan
    rest = torch.tensor([0, 2])
    fewer = SwitchingModel(
        model.transition,
        model.F,
        model.Q,
        model.H[:, rest],
        model.R[:, rest][:, :, rest],
        model.b,
        model.d[:, rest],
    )
    found = filter_of(model, method).filter(y, start)
    expected = filter_of(fewer, method).filter(y[:, rest], start)
    for name in Filtered._fields:
        if "innovation" not in name:
            e = getattr(expected, name)
            close(getattr(found, name), e, 10 * (1 + e[e.isfinite()].abs().amax()))
    assert found.innovation[:, 1].isnan().all()
    close(found.innovation[:, rest], expected.innovation, 10.0)
    close(found.innovation_covariance[:, rest][..., rest], expected.innovation_covariance, 100.0)


@each
def test_masks_gaps_and_lengths_say_the_same(method):
    model, start = system(2), beginning(2)
    y = observed(model, 6, 3)
    lengths = torch.tensor([6, 2, 0])
    inside = torch.arange(6) < lengths[:, None]
    gaps = y.masked_fill(~inside.unsqueeze(-1), torch.nan)
    run = filter_of(model, method).filter
    by_gap = run(gaps, start)
    same(run(Series(y, lengths=lengths), start), by_gap)
    same(run(Series(y, mask=inside), start), by_gap)
    same(run(Series(y, mask=inside.unsqueeze(-1).expand(y.shape)), start), by_gap)
    close(by_gap.step_log_likelihood[~inside], torch.zeros(10, dtype=F64))
    for name in ("mean", "covariance", "log_mode_probability"):  # nothing was observed: what was predicted stays
        close(getattr(by_gap, name)[2], getattr(by_gap, f"predicted_{name}")[2], 10.0)
    short = run(y[1, :2], start)
    close(by_gap.log_likelihood[1], short.log_likelihood, 100.0)


@each
def test_inputs_are_offsets(method):
    steps = 4
    model, start = system(2), beginning(2)
    B, D, u = torch.randn(2, 2, 3, dtype=F64), torch.randn(2, 2, 3, dtype=F64), torch.randn(steps, 3, dtype=F64)
    plain = {f: getattr(model, f) for f in ("transition", "F", "Q", "H", "R")}
    driven = SwitchingModel(**plain, b=model.b, d=model.d, B=B, D=D)
    b, d = model.b + torch.einsum("ksu,tu->tks", B, u), model.d + torch.einsum("kou,tu->tko", D, u)
    offset = SwitchingModel(**plain, b=b, d=d)
    y = observed(model, steps)
    found = filter_of(driven, method).filter(Series(y, inputs=u), start)
    same(found, filter_of(offset, method).filter(y, start))


@each
def test_weights_are_probabilities_and_covariances_are_covariances(method):
    model, start = system(3, 4, 2), beginning(3, 4)
    found = filter_of(model, method).filter(100 * observed(model, 30), start)
    for name in ("log_mode_probability", "predicted_log_mode_probability"):
        close(getattr(found, name).exp().sum(-1), torch.ones(30, dtype=F64))
    for name in Filtered._fields:
        if name.endswith("covariance"):
            P = getattr(found, name)
            assert torch.equal(P, P.mT), name
            assert (torch.linalg.eigvalsh(P) > 0).all(), name


@each
def test_float32_is_float64_rounded(method):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 30)
    fields = {f: getattr(model, f).float() for f in ("transition", "F", "Q", "H", "R", "b", "d")}
    low = filter_of(SwitchingModel(**fields), method).filter(y.float(), tree_map(lambda t: t.float(), start))
    high = filter_of(model, method).filter(y, start)
    assert low.mean.dtype == torch.float32
    close(low.mean, high.mean.float(), 10 * high.mean.abs().amax().float())
    close(low.log_likelihood, high.log_likelihood.float(), high.log_likelihood.abs().float())


def test_modes_that_cannot_be_are_never_and_harm_nothing():
    """Mode 0 is left for good, mode 2 is never entered."""
    T = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], dtype=F64)
    model, start = system(3, transition=T), beginning(3)
    start = replace(start, log_mode_probability=torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64))
    y = observed(model, 4)
    for filter in (gpb1, gpb2, imm):
        found = filter(model, y, start)
        assert torch.equal(found.log_mode_probability.exp(), torch.tensor([[0.0, 1.0, 0.0]], dtype=F64).expand(4, 3))
        assert all(part.isfinite().all() for name, part in found._asdict().items() if "probability" not in name)
        only = {f: getattr(model, f)[1:2] for f in ("F", "Q", "H", "R", "b", "d")}
        alone = SwitchingModel(torch.ones(1, 1, dtype=F64), **only)
        kalman = imm(alone, y, Prior(start.mean[0], start.covariance[0]))
        close(found.mean, kalman.mean, 10.0)
        close(found.log_likelihood, kalman.log_likelihood, 100.0)


@each
def test_outliers_of_a_million_deviations_keep_every_log_probability(method):
    """T = I: log odds are differences of log densities, however far out, and come back when the outlier is undone."""
    model, start = system(2, 1, 1, transition=torch.eye(2, dtype=F64)), beginning(2, 1)
    y = torch.tensor([[1e6], [1.0]], dtype=F64)
    found = filter_of(model, method).filter(y, start)
    assert all(part.isfinite().all() for part in found)
    odds = found.log_mode_probability.diff(dim=-1)
    rise = start.log_mode_probability.diff(dim=-1) + found.mode_log_likelihood.diff(dim=-1).cumsum(0)
    close(odds, rise, 1e12)
    assert odds.abs().amax() > 1e9


@each
def test_switches_bring_a_mode_back_from_nothing(method):
    """After an outlier a mode has probability exp(-1e11); one step on, it has what the chain gives it."""
    model, start = system(2, 1, 1), beginning(2, 1)
    found = filter_of(model, method).filter(torch.tensor([[1e6], [torch.nan]], dtype=F64), start)
    sure = found.log_mode_probability[0].argmax()
    assert found.log_mode_probability[0].amin() < -1e9
    close(found.log_mode_probability[1].exp(), model.transition[sure])


COMPILED = find_spec("numba") is not None
FEW = 600  # of torch, whose steps cost a thousand times those of the compiled path
LENGTHS = [FEW, 200_000 if COMPILED else pytest.param(200_000, marks=pytest.mark.long)]
LENGTHS.append(pytest.param(1_000_000, marks=pytest.mark.long))


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("filter", [gpb1, gpb2, imm], ids=["gpb1", "gpb2", "imm"])
def test_long_runs_stay_symmetric_and_positive(filter, steps):
    """Every covariance of every step, by the compiled path where there is one; few steps by the other."""
    slow, fast = (
        constant_velocity(2, dt=0.1, spectral_density=q, observation_variance=1e-6, dtype=F64) for q in (1e-8, 1.0)
    )
    turn = coordinated_turn(2, dt=0.1, rate=0.5, spectral_density=1e-8, observation_variance=1e-6, dtype=F64)
    T = torch.tensor([[0.98, 0.01, 0.01], [0.1, 0.85, 0.05], [0.02, 0.03, 0.95]], dtype=F64)
    model = SwitchingModel.of([slow, fast, turn], transition=T)
    generator = torch.Generator().manual_seed(0)
    path = torch.randn(steps, 2, dtype=F64, generator=generator).cumsum(0).cumsum(0) * 0.01  # as far as it goes
    y = path + 1e-3 * torch.randn(steps, 2, dtype=F64, generator=generator)
    state = Prior(torch.zeros(4, dtype=F64), 1e6 * torch.eye(4, dtype=F64))
    if steps == FEW:
        y.requires_grad_()  # by torch
    names = ("covariance", "mode_covariance", "predicted_covariance", "innovation_covariance")
    carried = ("mean", "covariance") if filter is gpb1 else ("mode_mean", "mode_covariance")
    for part in y.split(100_000):  # what a filter knows after a series is what it begins the next one with
        found = filter(model, part, state, fields=(*names, *carried, "log_mode_probability"))
        for P in (getattr(found, name) for name in names):
            assert torch.equal(P, P.mT)
            assert not torch.linalg.cholesky_ex(P).info.any()
            assert (P[-1].diagonal(dim1=-2, dim2=-1) < 1e3).all()  # and it has settled
        assert found.log_likelihood.isfinite()
        mean, covariance = (getattr(found, name)[-1].detach() for name in carried)
        log_pi = found.log_mode_probability[-1].detach()
        state = Prior(mean, covariance, log_pi.log_softmax(-1))


@pytest.mark.parametrize("far", [3.0, 300.0, 1e6])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["torch", "compiled"])
@each
def test_probabilities_after_are_those_before_times_likelihoods(monkeypatch, method, is_compiled, far):
    """log pi' = log c + log p(y | mode) - log p(y), also where the observation brings back what was given up."""
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0 if is_compiled else torch.inf)
    model, start = system(2, 1, 1), beginning(2, 1)
    y = observed(model, 6, 4)
    y[:, 2:4] = far
    found = filter_of(model, method).filter(y, start)
    joint = found.predicted_log_mode_probability + found.mode_log_likelihood
    close(found.log_mode_probability, joint - found.step_log_likelihood.unsqueeze(-1), far**2 * 10)
    close(found.step_log_likelihood, joint.logsumexp(-1), far**2 * 10)


@each
def test_a_first_step_that_moves_nothing_is_bayes_rule(method):
    """Beliefs about the time of the first observation, as packages have them that update first."""
    model, start = system(3, B=torch.randn(3, 2, 1, dtype=F64)), beginning(3)
    y, u = observed(model, 3), torch.randn(3, 1, dtype=F64)
    m, P = (start.mean, start.covariance) if method[1] > 1 else (start.mean[0], start.covariance[0])
    begins = Prior(m, P, start.log_mode_probability)
    m, P = m.expand(3, 2), P.expand(3, 2, 2)
    found = filter_of(model.still_first(3), method).filter(Series(y, inputs=u), begins)
    S = model.H @ P @ model.H.mT + model.R
    expected = (model.H @ m.unsqueeze(-1)).squeeze(-1) + model.d
    log_density = torch.distributions.MultivariateNormal(expected, S).log_prob(y[0])
    close(found.log_mode_probability[0], (begins.log_mode_probability + log_density).log_softmax(-1), 100.0)
    K = P @ model.H.mT @ torch.linalg.inv(S)
    close(found.mode_mean[0], m + (K @ (y[0] - expected).unsqueeze(-1)).squeeze(-1), 100.0)
    # And from there on it is the filter that begins with what is known then.
    if method[0] == "imm":
        then = Prior(found.mode_mean[0], found.mode_covariance[0], found.log_mode_probability[0])
        rest = imm(model, Series(y[1:], inputs=u[1:]), then)
        close(found.mean[1:], rest.mean, 100.0)
        close(found.covariance[1:], rest.covariance, 100.0)


def test_the_exact_filter_obeys_the_law_of_total_expectation():
    """Of two possible second observations, weighed by their density, the mean is the predicted mean: by quadrature."""
    model, start = system(2, 1, 1), beginning(2, 1)
    first = observed(model, 1)
    x = torch.linspace(-80, 80, 8001, dtype=F64)
    y = torch.stack((first.expand(8001, 1), x.unsqueeze(-1)), 1)
    found = enumerate_modes(model, y, start).filtered
    density = found.step_log_likelihood[:, 1].exp() * (x[1] - x[0])
    close(density.sum(), torch.ones((), dtype=F64), tolerance=1e-8)
    close((density.unsqueeze(-1) * found.mean[:, 1]).sum(0), found.predicted_mean[0, 1], 10.0, tolerance=1e-8)
    probability = (density.unsqueeze(-1) * found.log_mode_probability[:, 1].exp()).sum(0)
    close(probability, found.predicted_log_mode_probability[0, 1].exp(), tolerance=1e-8)
