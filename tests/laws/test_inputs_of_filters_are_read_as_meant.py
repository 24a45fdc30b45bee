"""Leading dimensions have one meaning, numpy arrays are tensors, rounding is forgiven, records have values."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Clutter,
    Filtered,
    FilterState,
    Generator,
    NonlinearModel,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    fit,
    gpb2,
    prior_with_clutter,
    random_walk,
    singer,
    smooth,
    with_clutter,
)
from support.scales import close
from support.switching_oracles import F64, beginning, chain, observed, positive, same, system

# As many targets as modes, as many targets as steps ------------------------------------------------------------------


@pytest.mark.parametrize("method", [imm, gpb2])
def test_a_prior_of_each_target_is_that_prior_alone(method):
    """Two targets and two modes: the case in which [2, s] could be either."""
    model = system(k=2)
    y, mean, P = observed(model, 4, 2), torch.randn(2, 2, dtype=F64), positive(2, 2)
    by_target, by_mode = (method(model, y, Prior(mean, P, per=per)) for per in ("target", "mode"))
    for i in range(2):
        same(Filtered(*(part[i] for part in by_target)), method(model, y[i], Prior(mean[i], P[i])), 100.0)
        same(Filtered(*(part[i] for part in by_mode)), method(model, y[i], Prior(mean, P)), 100.0)
    assert float((by_target.mean - by_mode.mean).abs().max()) > 1e-3


def test_a_prior_of_each_target_has_a_meaning_for_any_number_of_targets():
    model, mean = system(k=2), torch.randn(3, 2, dtype=F64)
    y = observed(model, 4, 3)
    one = imm(model, y, Prior(mean, torch.eye(2, dtype=F64), per="target"))
    same(one, imm(model, y, Prior(mean.unsqueeze(1), torch.eye(2, dtype=F64))), 10.0)
    doubled = prior_with_clutter(Prior(mean, torch.eye(2, dtype=F64), per="target"))
    close(imm(with_clutter(model, 0.0, torch.eye(2, dtype=F64)), y, doubled).mean, one.mean, 100.0)


@pytest.mark.parametrize("method", [imm, smooth])
def test_a_model_of_each_target_is_that_model_alone(method):
    """Four targets and four steps: [4, k, s, s] could be either."""
    base, F = system(k=2), 0.5 * torch.randn(4, 2, 2, 2, dtype=F64)
    start, y = beginning(2), observed(base, 4, 4)
    by_target, by_time = (method(replace(base, F=F, per=per), y, start) for per in ("target", "time"))
    for i in range(4):
        close(by_target.mean[i], method(replace(base, F=F[i]), y[i], start).mean, 100.0)
        close(by_time.mean[i], method(replace(base, F=F), y[i], start).mean, 100.0)
    assert float((by_target.mean - by_time.mean).abs().max()) > 1e-3


def test_the_library_does_not_refuse_what_it_made():
    """Discretised models, and models that are still first, vary with time."""
    noise = {"spectral_density": 0.1, "observation_variance": 1.0, "dtype": F64}
    start, y, times = Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)), torch.randn(4, 4, 1, dtype=F64), None
    times = torch.rand(4, dtype=F64).cumsum(0)
    rate = Generator(torch.tensor([[-0.1, 0.1], [0.2, -0.2]], dtype=F64))
    flowing = SwitchingModel.of([constant_velocity(1, **noise)] * 2, transition=rate)
    one = imm(flowing, Series(y, times=times), start)
    close(imm(flowing.at(times.diff(prepend=times.new_zeros(1))), y, start).mean, one.mean, 10.0)
    stepping = SwitchingModel.of([constant_velocity(1, dt=1.0, **noise)] * 2, transition=chain(2))
    close(imm(stepping.still_first(4), y, start).mean[1], imm(stepping.still_first(4), y[1], start).mean, 10.0)


# Arrays, numbers and rounding ----------------------------------------------------------------------------------------


def test_numpy_arrays_are_tensors():
    model, start = system(k=2), beginning(2)
    y, mask = observed(model, 5, 3), torch.rand(3, 5) > 0.3
    names = ("transition", "F", "Q", "H", "R", "b", "d")
    arrays = SwitchingModel(**{name: getattr(model, name).numpy() for name in names})
    prior = Prior(start.mean.numpy(), start.covariance.numpy(), start.log_mode_probability.numpy(), per="mode")
    lengths = np.array([5, 5, 3])
    assert arrays == model
    assert prior == start
    found = imm(arrays, Series(y.numpy(), mask=mask.numpy(), lengths=lengths), prior)
    same(found, imm(model, Series(y, mask=mask, lengths=torch.as_tensor(lengths)), start))
    modes = [KalmanModel(*(getattr(model, name)[j].numpy() for name in "FQHR")) for j in range(2)]
    assert SwitchingModel.of(modes, transition=model.transition.numpy()) == replace(model, b=None, d=None)
    arrays = NonlinearModel.of(modes, transition=model.transition.numpy())
    close(imm(arrays, y, start).mean, imm(replace(model, b=None, d=None), y, start).mean, 100.0)
    Q = model.Q.numpy().copy()
    copied = replace(model, Q=Q)
    Q[:] = 0
    assert copied == model  # a model is not changed from outside


def test_numbers_are_matrices_of_size_one():
    walk, still = KalmanModel(1.0, 0.1, 1, 2.0, b=0.5), KalmanModel(1, 0, 1, 2)
    T = np.array([[0.9, 0.1], [0.1, 0.9]])
    found = SwitchingModel.of([walk, still], transition=torch.as_tensor(T).float())
    number = torch.tensor
    modes = [
        KalmanModel(*number([[[1.0]], [[0.1]], [[1.0]], [[2.0]]]), b=number([0.5])),
        KalmanModel(*number([[[1.0]], [[0.0]], [[1.0]], [[2.0]]])),
    ]
    assert found == SwitchingModel.of(modes, transition=number(T).float())
    double = SwitchingModel.of([walk, still], transition=T)  # numbers alone take the dtype of the transition matrix
    assert double.F.dtype == double.R.dtype == F64
    assert Prior(0.0, 2.0) == Prior(torch.zeros(1), 2 * torch.eye(1))
    mixed = SwitchingModel.of(
        [KalmanModel(np.eye(2), np.eye(2), np.ones((1, 2), dtype=int), 1.0)], transition=[[1.0]] @ np.eye(1)
    )
    assert mixed.H.dtype == mixed.R.dtype == F64


@pytest.mark.parametrize("size", [5e-14, 1e-9])
def test_asymmetry_of_rounding_is_removed(size):
    model, start = system(k=2), beginning(2)
    bent = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64) * size
    skew = replace(model, Q=model.Q + bent, R=model.R + bent)
    for name in ("Q", "R"):
        assert torch.equal(getattr(skew, name), getattr(skew, name).mT)
        close(getattr(skew, name), getattr(model, name), 10.0)
    y = observed(model, 3)
    found = imm(model, y, replace(start, covariance=start.covariance + bent))
    assert torch.equal(found.covariance, found.covariance.mT)
    close(found.mean, imm(model, y, start).mean, 100.0)


# Motion with own noise along each axis -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.5, None, torch.tensor([0.5, 1.0, 2.0], dtype=F64)])
@pytest.mark.parametrize("kind", [random_walk, constant_velocity, constant_acceleration, singer, coordinated_turn])
def test_axes_may_have_their_own_noise(kind, step):
    """Each axis is the model of one dimension with its own numbers; a turn of rate 0 is straight."""
    density = "acceleration_variance" if kind is singer else "spectral_density"
    more = {singer: {"correlation_time": 3.0}, coordinated_turn: {"rate": 0.0}}.get(kind, {}) | {
        "dtype": F64,
        "dt": step,
    }
    q, r = [0.1, 0.5, 2.0], np.array([1.0, 4.0, 9.0])
    found = kind(3, **{density: q}, observation_variance=r, **more)
    single = constant_velocity if kind is coordinated_turn else kind
    more.pop("rate", None)
    n = found.F.shape[-1] // 3
    for i in range(3):
        alone, part = single(1, **{density: q[i]}, observation_variance=float(r[i]), **more), slice(i * n, (i + 1) * n)
        close(found.F[..., part, part], alone.F, 10.0)
        close(found.Q[..., part, part], alone.Q, 10.0)
        close(found.R[i, i], alone.R[0, 0], 10.0)
    outside = torch.kron(torch.eye(3, dtype=F64), torch.ones(n, n, dtype=F64)) == 0
    assert not bool(found.Q[..., outside].any())
    alike = kind(
        3,
        **{density: [0.1] * 3},
        observation_variance=1.0,
        **({"rate": 0.0} if kind is coordinated_turn else {}),
        **more,
    )
    close(
        alike.Q,
        kind(
            3, **{density: 0.1}, observation_variance=1.0, **({"rate": 0.0} if kind is coordinated_turn else {}), **more
        ).Q,
    )


def test_densities_of_axes_have_gradients():
    q = torch.tensor([0.1, 0.2], dtype=F64, requires_grad=True)
    Q = constant_velocity(2, dt=1.0, spectral_density=q, observation_variance=1.0).Q
    (gradient,) = torch.autograd.grad(Q[2:, 2:].sum(), q)
    close(gradient, torch.tensor([0.0, 1 / 3 + 1 / 2 + 1 / 2 + 1], dtype=F64), 10.0)


# Records -------------------------------------------------------------------------------------------------------------


def saved():
    noise = {"spectral_density": 0.1, "observation_variance": 1.0}
    rate = Generator(torch.tensor([[-0.1, 0.1], [0.2, -0.2]]))
    model, start = system(), beginning()
    state, found = SwitchingFilter(model).step(SwitchingFilter(model).init(start), observed(model, 1)[0])
    flowing = SwitchingModel.of([constant_velocity(1, **noise)] * 2, transition=rate)
    return [
        model,
        flowing,
        rate,
        start,
        state,
        Series(torch.zeros(3, 2), lengths=None),
        found,
        constant_velocity(1, **noise),
        Clutter(torch.tensor(0.1), torch.eye(2)),
    ]


@pytest.mark.parametrize("record", saved(), ids=lambda r: type(r).__name__)
def test_records_are_saved_and_loaded_as_weights(record):
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    if isinstance(record, tuple):  # Filtered and KalmanModel are plain tuples
        assert type(loaded) is type(record)
        for a, b in zip(loaded, record, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    else:
        assert loaded == record
        assert hash(loaded) == hash(record)
        assert "0x" not in repr(record)


def test_a_fit_is_saved_and_loaded():
    one = torch.ones(1, 1, 1, dtype=F64)
    model = SwitchingModel(torch.ones(1, 1, dtype=F64), one, one, one, one)
    fitted = fit(model, torch.ones(3, 4, 1, dtype=F64), Prior(np.zeros(1), np.eye(1)), learn=["R"], max_iterations=1)
    file = io.BytesIO()
    torch.save(fitted, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert (loaded.model, loaded.prior, loaded.converged) == (fitted.model, fitted.prior, fitted.converged)


def test_records_are_compared_by_value():
    model, start = system(), beginning()
    assert model == replace(model)
    assert model != replace(model, F=model.F + 1e-15)
    assert model.allclose(replace(model, F=model.F + 1e-15))
    assert not model.allclose(replace(model, F=model.F + 1e-3))
    assert model.allclose(replace(model, F=model.F + 1e-3), atol=1e-2)
    assert model != replace(model, b=None)
    assert model != replace(model, fill="zero")
    assert not model.allclose(start)
    assert model != start
    assert (
        replace(start, mean=start.mean.float(), covariance=start.covariance.float(), log_mode_probability=None) != start
    )


def test_records_are_printed_with_their_sizes():
    model = SwitchingModel.of([random_walk(1, dt=1.0, spectral_density=1.0, observation_variance=1.0)], transition=1.0)
    assert (
        repr(model) == "SwitchingModel(transition=[1, 1], F=[1, 1, 1], Q=[1, 1, 1], H=[1, 1, 1], R=[1, 1, 1], float32)"
    )
    curved = NonlinearModel(
        torch.ones(1, 1), torch.sin, torch.ones(1, 1, 1), torch.cos, torch.ones(1, 1, 1), method="ukf"
    )
    assert repr(curved).endswith("move=(sin), Q=[1, 1, 1], observe=(cos), R=[1, 1, 1], method='ukf', float32)")


def test_targets_are_selected_and_joined():
    model = system()
    online, y = SwitchingFilter(model), observed(model, 2, 5)
    state, _ = online.step(online.init(beginning(), batch_shape=(5,)), y[:, 0])
    alive = torch.tensor([True, False, True, True, False])
    again = FilterState.cat((state[alive], state[~alive]))
    order = torch.cat((alive.nonzero(), (~alive).nonzero())).squeeze(-1)
    assert again == state[order]
    assert again.filter == "imm"
    close(online.step(again, y[order, 1])[1].mean, online.step(state, y[:, 1])[1].mean[order], 10.0)
