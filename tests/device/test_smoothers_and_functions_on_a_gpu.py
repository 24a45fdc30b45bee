"""Smoothers, functions, particles, times and learning on a GPU: the numbers of the CPU, and nothing that waits."""

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gradlogz
from gradlogz import (
    AttentionFilter,
    ConjugateFilter,
    Prior,
    Series,
    SwitchingFilter,
    SwitchingModel,
    fit,
    gpb2,
    imm,
    smooth,
)
from gradlogz.filters import Discount, Generator, Reset, attentive_imm, enumerate_modes, rao_blackwell_filter
from support.filter_calls import (
    CALLS,
    FAMILIES,
    Place,
    bending,
    conjugate,
    flowing,
    message,
    radar,
    same_everywhere,
    series,
    taught,
    turning,
)
from support.switching_oracles import F64, beginning, chain, observed, system

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HERE, THERE = Place(), Place("cuda")
each = pytest.mark.parametrize("name", CALLS)
# The order of histories that are nearly as likely, marginals to 1e-12 and pseudo-inverses need more digits than these.
SINGLE = [name for name in CALLS if not any(word in name for word in ("likeliest", "sinkhorn", "kim", "later"))]


def test_every_public_function_is_called_here():
    functions = [n for n, value in vars(gradlogz.filters).items() if inspect.isfunction(value)]
    assert set(functions) <= {name.split(":")[0] for name in CALLS}


@each
def test_the_numbers_are_those_of_the_cpu(name):
    run = CALLS[name]()
    same_everywhere(run(THERE), run(HERE), device="cuda")


@pytest.mark.parametrize("name", SINGLE)
def test_single_precision_stays_and_is_near(name):
    run = CALLS[name]()
    expected, found = run(HERE), run(Place("cuda", torch.float32))
    same_everywhere(found, expected, tolerance=1e-3, device="cuda")
    assert {t.dtype for t in tree_leaves(found) if isinstance(t, torch.Tensor)} <= {
        torch.float32,
        torch.int64,
        torch.bool,
    }


# Derivatives ---------------------------------------------------------------------------------------------------------


FIELDS = ("transition", "F", "Q", "H", "R", "b", "d")


def slopes(at, given, total):
    """Derivatives of a number by all that it depends on."""
    leaves = [t.detach().requires_grad_() for t in at(given)]
    return torch.autograd.grad(total(*leaves), leaves, allow_unused=True)


def compared(given, total):
    for a, e in zip(slopes(THERE, given, total), slopes(HERE, given, total), strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert a.device.type == "cuda"
            torch.testing.assert_close(a.cpu(), e, rtol=1e-9, atol=1e-9 * float(1 + e.abs().max()))


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize("method", ["imm", "gpb2", "kim", "enumerate"])
def test_gradients_of_smoothers_are_those_of_the_cpu(method, lag):
    model, start = system(2), beginning(2)
    y = observed(model, 4, 3)

    def total(y, mean, covariance, log_pi, *fields):
        begins = Prior(mean, covariance, log_pi)
        own = {} if method == "enumerate" else {"lag": lag}
        found = smooth(SwitchingModel(*fields, validate=False), y, begins, method=method, **own)
        parts = (found.mean, found.covariance, found.lag_covariance, found.log_pair_probability.exp())
        return sum(part.sin().sum() for part in (*parts, found.initial_mode_mean)) + found.filtered.log_likelihood.sum()

    compared([y, *tree_leaves(start), *(getattr(model, f) for f in FIELDS)], total)


def test_gradients_at_any_time_are_those_of_the_cpu():
    fields, series, prior = flowing()
    y, times, rate = series.observations, series.times, fields.pop("transition").rate

    def total(y, times, mean, covariance, rate, *given):
        model = SwitchingModel(Generator(rate), **dict(zip(fields, given, strict=True)), validate=False)
        return smooth(model, Series(y, times=times), Prior(mean, covariance)).mean.sin().sum()

    compared([y.nan_to_num(0.3), times, prior.mean, prior.covariance, rate, *fields.values()], total)


@pytest.mark.parametrize("method", ["ekf", "ukf"])
def test_gradients_of_functions_are_those_of_the_cpu(method):
    y, start = radar()

    def total(y, mean, covariance):
        at = Place(y.device.type)
        model = turning(at, method)
        found = [f(model, y, Prior(mean, covariance)).mean for f in (imm, gpb2, smooth)]
        return sum(m.sin().sum() for m in found)

    compared([y.nan_to_num(20.0), start.mean, start.covariance + 0.01], total)


@pytest.mark.parametrize("name", [*FAMILIES, "LinearGaussian"])
def test_gradients_of_conjugate_filters_are_those_of_the_cpu(name):
    family, prior, y, _ = conjugate()[name]

    def total(prior, transition):
        given, seen = Place(prior.device.type)((family, y))
        chosen = ConjugateFilter(given, transition=transition, dynamics=(Discount(0.9), Reset(prior)), validate=False)
        found = chosen.filter(seen, prior=prior)
        return found.log_likelihood.sum() + found.mode_mean.sin().sum()

    compared([prior, chain(2)], total)


@pytest.mark.parametrize("method", ["imm", "gpb2", "kim"])
def test_smoothers_are_mapped(method):
    model, start = THERE((system(2, lead=(4, 1)), beginning(2)))
    y = observed(model, 4, 4).cuda()
    each_of = {name: getattr(model, name) for name in FIELDS if name != "transition"}

    def alone(y, fields):
        return smooth(SwitchingModel(model.transition, **fields, validate=False), y, start, method=method)

    same_everywhere(torch.func.vmap(alone)(y, each_of), HERE(smooth(model, y, start, method=method)), device="cuda")


# Draws ---------------------------------------------------------------------------------------------------------------


def test_particles_that_draw_the_same_numbers_are_the_same(monkeypatch):
    given = series()

    def sampled(at):
        numbers = torch.Generator().manual_seed(3)

        def rand(*shape, generator, dtype, device):  # generators of devices differ: numbers of one, for both
            return torch.empty(*shape, dtype=dtype).uniform_(generator=numbers).to(device)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", rand)
            return rao_blackwell_filter(*at(given), particles=50, threshold=0.9)

    expected = sampled(HERE)
    assert expected.resampled.any()
    assert not expected.resampled.all()
    same_everywhere(sampled(THERE), expected, device="cuda")


def test_particles_have_no_bias_and_repeat_themselves():
    model, start = system(2), beginning(2)
    y = observed(model, 5)
    truth = enumerate_modes(model, y, start).filtered.log_likelihood
    there, series_there, begins = THERE((model, y.expand(500, 5, 2), start))

    def sampled(seed):
        draws = torch.Generator("cuda").manual_seed(seed)
        return rao_blackwell_filter(there, series_there, begins, particles=8, threshold=1.0, generator=draws)

    found = sampled(0)
    ratio = (found.filtered.log_likelihood.cpu() - truth).exp()
    assert float(ratio.std()) > 1e-3  # they are drawn
    assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / 500**0.5
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(found), tree_leaves(sampled(0)), strict=True))
    assert not torch.equal(found.histories, sampled(1).histories)


def test_starts_of_learning_are_drawn_there():
    given = THERE(taught())
    options = {"learn": ["transition", "Q", "d"], "max_iterations": 3}

    def found(seed):
        return fit(*given, starts=3, generator=torch.Generator("cuda").manual_seed(seed), **options)

    first = found(0)
    assert float(first.log_likelihood) == float(first.starts.max())
    assert len(first.starts.unique()) == 3
    assert torch.equal(first.starts, found(0).starts)
    assert not torch.equal(first.starts, found(1).starts)


# Tensors that were left on the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["mask", "lengths", "mean", "covariance", "log_mode_probability"])
def test_what_was_left_on_the_cpu_is_named(left):
    _, y, prior = series(2, 2, steps=4, targets=3)
    of = y if left in ("mask", "lengths") else prior
    with pytest.raises(ValueError, match=f"^{type(of).__name__}: .*device.*{left} on cpu"):
        replace(THERE(of), **{left: getattr(of, left)})


@pytest.mark.parametrize("left", ["observations", "prior.mean"])
@pytest.mark.parametrize(
    "function", [imm, smooth, enumerate_modes, rao_blackwell_filter, fit], ids=lambda f: f.__name__
)
def test_a_prior_and_a_series_are_where_the_model_is(function, left):
    model, y, prior = series(2, 2, steps=4, targets=3)
    y, prior = (y, THERE(prior)) if left == "observations" else (THERE(y), prior)
    with pytest.raises(ValueError, match=f"^{function.__name__}: .*device.*{left} on cpu"):
        function(THERE(model), y, prior)


@pytest.mark.parametrize("left", ["observations", "times", "model"])
def test_series_and_models_are_on_one_device(left):
    fields, y, prior = flowing()
    whole = {"observations": y.observations, "times": y.times, "model": SwitchingModel(**fields)}
    given = THERE(whole) | {left: whole[left]}
    call = "smooth" if left == "model" else "Series"
    with pytest.raises(ValueError, match=f"^{call}: .*device.*{left} on cpu"):
        smooth(given["model"], Series(given["observations"], times=given["times"]), THERE(prior))


@pytest.mark.parametrize("left", ["mask", "lengths", "prior", "log_mode_probability"])
def test_conjugate_filters_name_it_too(left):
    family, prior, y, _ = conjugate()["GammaPoisson"]
    chosen = ConjugateFilter(family, transition=chain(2).cuda(), dynamics=(Discount(0.9), Reset(prior.cuda())))
    options = {
        "mask": torch.ones(3, 5, dtype=torch.bool),
        "lengths": torch.tensor([5, 4, 3]),
        "prior": prior,
        "log_mode_probability": torch.full((2,), 0.5, dtype=F64).log(),
    }
    call = "Series" if left in ("mask", "lengths") else "ConjugateFilter.filter"
    given = THERE(options) | {left: options[left]}
    mask, lengths = given.pop("mask"), given.pop("lengths")
    with pytest.raises(ValueError, match=f"^{call}: .*device.*{left} on cpu"):
        chosen.filter(Series(y.cuda(), mask=mask, lengths=lengths), **given)


@pytest.mark.parametrize("left", ["value", "noise", "eta"])
def test_attention_filters_name_it_too(left):
    slots, eta, value, noise = message()
    given = THERE({"value": value, "noise": noise, "eta": eta}) | {
        left: {"value": value, "noise": noise, "eta": eta}[left]
    }
    with pytest.raises(ValueError, match=r"^AttentionFilter(\.step)?: .*device.* on cpu"):
        AttentionFilter(value=given["value"], noise=given["noise"], message="covariance").step(
            THERE(slots), given["eta"]
        )


def test_the_length_of_a_step_may_come_from_anywhere():
    fields, series, prior = THERE(flowing())
    y = series.observations
    online = SwitchingFilter(SwitchingModel(**fields))
    state = online.init(prior, batch_shape=(5,))
    dt = torch.linspace(0.1, 1.0, 5, dtype=F64)
    same_everywhere(online.step(state, y[:, 0], dt=dt), HERE(online.step(state, y[:, 0], dt=dt.cuda())), device="cuda")


# Waiting -------------------------------------------------------------------------------------------------------------


def linear(**more):
    return THERE(series(validate=False, **more))


def smoothed(**options):
    given = linear()
    return lambda: smooth(*given, **options)


def differentiated():
    model, series, prior = linear()
    y = series.observations.nan_to_num(0.0).requires_grad_()
    return lambda: torch.autograd.grad(smooth(model, replace(series, observations=y), prior).mean.sum(), y)


def unequal():
    given = linear(components=((0, 1), (0, 1, 2), (1, 2, 3)))
    return lambda: (smooth(*given), smooth(*given, method="imm", lag=2))


def at_any_time():
    fields, y, prior = THERE(flowing())
    model = SwitchingModel(**fields, validate=False)
    return lambda: smooth(model, y, prior)


def step_by_step():
    fields, series, prior = THERE(flowing())
    y = series.observations
    model = SwitchingModel(**fields, components=((0, 1), (0, 1, 2), (1, 2, 3)), validate=False)
    online = SwitchingFilter(model, "gpb")
    state = online.init(prior, batch_shape=(5,))
    return lambda: online.step(online.step(state, y[:, 0], dt=0.3)[0], y[:, 1], dt=2)


def functions(method):
    y, start = THERE(radar())
    model = turning(THERE, method, validate=False)
    return lambda: (imm(model, y, start), smooth(model, y, start), smooth(model, y, start, lag=1))


def flows():
    y, start = THERE(radar())
    times = torch.arange(6, dtype=F64).sqrt().cuda()
    model = bending(THERE, "ekf", validate=False)
    return lambda: smooth(model, Series(y, times=times), start)


def drawn_histories():
    given = linear()
    draws = torch.Generator("cuda").manual_seed(0)
    return lambda: rao_blackwell_filter(*given, particles=20, generator=draws)


def enumerated():
    given = linear()
    return lambda: enumerate_modes(*given, max_histories=20)


def attentive():
    given = linear()
    eta = torch.randn(3, 4, dtype=F64).cuda()
    return lambda: attentive_imm(*given, eta=eta)


def conjugated(name):
    (family, prior, y, motion), T = THERE((conjugate()[name], chain(2)))

    def run():
        for dynamics in ((motion, Discount(0.9, prior)), (Discount(0.95), Reset(prior))):
            ConjugateFilter(family, transition=T, dynamics=dynamics, validate=False).filter(y, prior=prior)

    return run


# Kim's smoother is not here: pseudo-inverses of covariances that may be singular come from eigenvalues, and torch waits
# to see whether these were found.
WITHOUT_WAITING = {
    "imm": lambda: smoothed(method="imm"),
    "gpb2": lambda: smoothed(),
    "lag": lambda: smoothed(lag=2),
    "histories": lambda: smoothed(method="enumerate", max_histories=10),
    "gradient": differentiated,
    "unequal": unequal,
    "times": at_any_time,
    "steps": step_by_step,
    "ekf": lambda: functions("ekf"),
    "ukf": lambda: functions("ukf"),
    "flows": flows,
    "particles": drawn_histories,
    "enumeration": enumerated,
    "attentive": attentive,
    **{name: lambda name=name: conjugated(name) for name in (*FAMILIES, "LinearGaussian")},
}


@pytest.mark.parametrize("prepare", WITHOUT_WAITING.values(), ids=WITHOUT_WAITING)
def test_nothing_waits_for_the_gpu(prepare):
    """A call that waited would raise in this mode."""
    run = prepare()
    run()  # libraries load
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # it says that it may miss some
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        assert torch.cuda.get_sync_debug_mode() == 2
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
