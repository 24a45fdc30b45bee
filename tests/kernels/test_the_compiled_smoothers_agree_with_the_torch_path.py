"""The compiled smoothers give the numbers of the torch path, and step aside where they cannot."""

import math
from dataclasses import replace

import pytest
import torch

from gradlogz import Prior, Series, SwitchingModel, smooth
from gradlogz.filters import Generator, Smoothed, constant_velocity
from gradlogz.kernels.filters import dispatch
from support.switching_oracles import F64, beginning, chain, observed, positive, system

backward = pytest.importorskip("gradlogz.kernels.filters.backward", reason="needs numba")

each = pytest.mark.parametrize("method", ["imm", "gpb2"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture
def calls(monkeypatch):
    """Let the kernel take everything, and count what it finished."""
    finished = []
    original = backward.smooth

    def counted(*arguments):
        result = original(*arguments)
        finished.append(result is not None)
        return result

    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    monkeypatch.setattr(backward, "smooth", counted)
    return finished


def by_torch(monkeypatch, model, y, start, **more):
    """The same by the torch path."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
        return smooth(model, y, start, **more)


def alike(result, expected, tolerance=1e-12):
    for name, a, e in zip(Smoothed._fields[:-1], result[:-1], expected[:-1], strict=True):
        size = 1 + float(e[e.isfinite()].abs().max())
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(result.filtered.log_likelihood, expected.filtered.log_likelihood)


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (1, 3, 2), (4, 2, 3)])
@pytest.mark.parametrize("targets", [1, 11])
def test_every_field_is_that_of_the_torch_path(calls, monkeypatch, method, k, s, o, targets):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, targets)
    y[:5, 2, 0] = torch.nan
    y[3:9, 4] = torch.nan
    series = Series(y, mask=torch.rand(targets, 7) > 0.2, lengths=torch.randint(1, 8, (targets,)))
    result = smooth(model, series, start, method=method)
    alike(result, by_torch(monkeypatch, model, series, start, method=method))
    assert calls == [True]


@pytest.mark.parametrize("k", [1, 3])
def test_sizes_may_be_known_when_a_kernel_is_compiled(calls, monkeypatch, k):
    monkeypatch.setattr(backward, "WORTH_SIZES", 0)
    model, start = system(k, 4, 2), beginning(k, 4)
    y = observed(model, 5, 9)
    y[:5, 2, 0] = torch.nan
    alike(smooth(model, y, start), by_torch(monkeypatch, model, y, start))
    assert calls == [True]


@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, monkeypatch, lead):
    T = torch.stack([chain(3) for _ in range(math.prod(lead))]).reshape(*lead, 3, 3)
    model, start = system(3, 2, 2, lead=lead, transition=T), beginning(3, 2)
    y = observed(model, 6, 3)
    alike(smooth(model, y, start), by_torch(monkeypatch, model, y, start))
    assert calls == [True]


def test_times_may_be_irregular(calls, monkeypatch):
    modes = [constant_velocity(1, spectral_density=q, observation_variance=0.5, dtype=F64) for q in (0.1, 3.0)]
    model = SwitchingModel.of(modes, transition=Generator(torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)))
    y, times = torch.randn(5, 8, 1, dtype=F64), torch.rand(5, 8, dtype=F64).cumsum(-1)
    series, start = Series(y, times=times), Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    alike(smooth(model, series, start), by_torch(monkeypatch, model, series, start))
    assert calls == [True]


@each
def test_modes_may_be_dead_and_noise_singular(calls, monkeypatch, method):
    T = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.0, 0.5, 0.5]], dtype=F64)
    model = system(3, 2, 2, transition=T)
    model = replace(model, Q=model.Q * torch.tensor([0.0, 1.0, 1.0], dtype=F64)[:, None, None])
    start = replace(beginning(3, 2), log_mode_probability=torch.tensor([0.4, 0.6, 0.0], dtype=F64).log())
    y = observed(model, 6, 9)
    result = smooth(model, y, start, method=method)
    alike(result, by_torch(monkeypatch, model, y, start, method=method))
    assert calls == [True]
    assert (result.log_mode_probability[..., 2] == -torch.inf).all()


def test_single_precision(calls, monkeypatch):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 6, 20)
    narrow = SwitchingModel(**{name: t.float() for name, t in model.fields().items()})
    begin = Prior(start.mean.float(), start.covariance.float(), start.log_mode_probability.float())
    result = smooth(narrow, y.float(), begin)
    wide = by_torch(monkeypatch, model, y, start)
    assert calls == [True]
    torch.testing.assert_close(result.mean.double(), wide.mean, rtol=0, atol=1e-3)


def test_requested_fields_alone_are_returned(calls, monkeypatch):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 6, 3)
    chosen = ("mean", "covariance", "previous_mean")
    expected = by_torch(monkeypatch, model, y, start)
    for result in (smooth(model, y, start, fields=chosen), by_torch(monkeypatch, model, y, start, fields=chosen)):
        for name in Smoothed._fields[:-1]:
            if name in chosen or name.startswith("initial"):
                value, reference = getattr(result, name), getattr(expected, name)
                torch.testing.assert_close(value, reference, rtol=0, atol=1e-12 * (1 + float(reference.abs().max())))
            else:
                assert getattr(result, name) is None
        torch.testing.assert_close(result.filtered.log_likelihood, expected.filtered.log_likelihood)
        assert result.filtered.mean is None
    assert calls == [True]


def test_what_the_kernel_cannot_do_takes_the_torch_path(calls):
    """Gradients, Kim's smoother, lags, and observations of density 0."""
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 6)
    learned = replace(model, R=model.R.clone().requires_grad_())
    assert smooth(learned, y, start).mean.requires_grad
    smooth(model, y, start, method="kim")
    smooth(model, y, start, lag=1)
    assert calls == []
    y[3] = 1e200
    result = smooth(model, y, start)
    assert not any(calls)
    assert result.mean.isfinite().all()


def test_many_threads_give_the_same(calls):
    model, start = system(3, 2, 2), beginning(3, 2)
    y, threads = observed(model, 20, 64), torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(smooth(model, y, start))
    torch.set_num_threads(threads)
    for a, b in zip(results[0][:-1], results[1][:-1], strict=True):
        assert torch.equal(a, b)
    assert calls == [True, True]


def test_states_larger_than_unrolled_loops(calls, monkeypatch):
    model = SwitchingModel(
        chain(2), torch.randn(2, 8, 8, dtype=F64) / 4, positive(2, 8), torch.randn(2, 3, 8, dtype=F64), positive(2, 3)
    )
    y, start = observed(model, 5, 3), beginning(2, 8)
    alike(smooth(model, y, start), by_torch(monkeypatch, model, y, start))
    assert calls == [True]
