"""The compiled switching filters give the numbers of the torch path, and step aside where they cannot."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from gradlogz import Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import Filtered, gpb
from gradlogz.kernels.filters import dispatch
from support.switching_oracles import F64, beginning, by_definition, observed, positive, same, system

lanes = pytest.importorskip("gradlogz.kernels.filters.lanes", reason="needs numba")
switching_cpu = pytest.importorskip("gradlogz.kernels.filters.cpu", reason="needs numba")

METHODS = {"imm": ("imm", 2), "gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture
def calls(monkeypatch):
    """Let the kernel take everything, and count what it finished."""
    finished = []
    forward = switching_cpu.forward

    def counted(*arguments, **more):
        found = forward(*arguments, **more)
        finished.append(found is not None)
        return found

    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    monkeypatch.setattr(switching_cpu, "forward", counted)
    return finished


def by_torch(monkeypatch, method, model, y, start, **more):
    """The same by the torch path."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
        return SwitchingFilter(model, *method).filter(y, start, **more)


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (1, 3, 2), (4, 2, 3)])
def test_every_field_is_that_of_the_torch_path(calls, monkeypatch, method, k, s, o):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, 19)
    y[:5, 2, 0] = torch.nan
    y[3:9, 4] = torch.nan
    more = {"mask": torch.rand(19, 7) > 0.2, "lengths": torch.randint(1, 8, (19,))}
    found = SwitchingFilter(model, *method).filter(Series(y, **more), start)
    same(found, by_torch(monkeypatch, method, model, Series(y, **more), start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize(("k", "steps"), [(3, 6), (2, 5)])
def test_sizes_may_be_known_when_a_kernel_is_compiled(calls, monkeypatch, k, steps):
    monkeypatch.setattr(switching_cpu, "WORTH_SIZES", 0)
    model, start = system(k, 4, 2), beginning(k, 4)
    y = observed(model, steps, 11)
    y[:5, 2, 0] = torch.nan
    same(imm(model, y, start), by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, monkeypatch, lead):
    model, start = system(3, 2, 2, lead=lead), beginning(3, 2)
    y = observed(model, 6, 3)
    found = imm(model, y, start)
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize("of_targets", [False, True], ids=["shared", "own"])
def test_inputs_enter_as_offsets(calls, monkeypatch, of_targets):
    plain = system(2, 3, 2)
    B, D = torch.randn(2, 3, 2, dtype=F64), torch.randn(2, 2, 2, dtype=F64)
    fields = {name: getattr(plain, name) for name in ("transition", "F", "Q", "H", "R", "b", "d")}
    model, start = SwitchingModel(**fields, B=B, D=D), beginning(2, 3)
    y = observed(model, 5, 2, 3)
    u = torch.randn(*((2, 3) if of_targets else ()), 5, 2, dtype=F64)
    found = imm(model, Series(y, inputs=u), start)
    same(found, by_torch(monkeypatch, ("imm", 2), model, Series(y, inputs=u), start), tolerance=1e-10)
    assert calls == [True]


def test_one_target_and_many_have_the_same_numbers(calls):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 9, 11)
    many = imm(model, y, start)
    for n in (0, 10):
        same(imm(model, y[n], start), Filtered(*(field[n] for field in many)))
    assert calls == [True] * 3


def test_histories_that_are_all_kept_are_the_joint_gaussians(calls):
    model, start = system(2, 2, 2), beginning(2, 2)
    y = observed(model, 4)
    y[1, 0] = torch.nan
    same(gpb(model, torch.stack((y, y)), start, depth=6), _twice(by_definition(model, y, start)), tolerance=1e-10)
    assert calls == [True]


def _twice(found):
    return Filtered(*(torch.stack((field, field)) for field in found))


@each
def test_the_last_step_alone_is_the_last_of_all(calls, monkeypatch, method):
    model, start = system(3, 2, 2, lead=(5,)), beginning(3, 2)
    chosen, y = SwitchingFilter(model, *method), observed(model, 5, 9)
    whole = chosen.filter(y, start)
    last = Filtered(*(field[:, -1] for field in whole[:-1]), whole.log_likelihood)
    same(chosen.filter(y, start, keep="last"), last)
    same(by_torch(monkeypatch, method, model, y, start, keep="last"), last, tolerance=1e-10)
    assert calls == [True, True]


@each
@pytest.mark.parametrize("targets", [1, 9])
@pytest.mark.parametrize("keep", ["all", "last"])
def test_fields_that_are_wanted_come_alone(calls, monkeypatch, method, targets, keep):
    """One by one, so that what is computed for one field is not owed to another."""
    model, start = system(3, 2, 2), beginning(3, 2)
    chosen, y = SwitchingFilter(model, *method), observed(model, 5, targets)
    y[0, 2, 0] = torch.nan
    whole = by_torch(monkeypatch, method, model, y, start, keep=keep)
    names = [
        (),
        *((name,) for name in Filtered._fields),
        ("mean", "log_mode_probability"),
        ("covariance", "innovation"),
    ]
    for wanted in names:
        for found in (
            chosen.filter(y, start, keep=keep, fields=wanted),
            by_torch(monkeypatch, method, model, y, start, keep=keep, fields=wanted),
        ):
            kept = {*wanted, "log_likelihood"}
            assert {name for name, t in found._asdict().items() if t is not None} == kept
            blank = dict.fromkeys(Filtered._fields, y[:0])
            a, e = (Filtered(**{**blank, **{name: getattr(f, name) for name in kept}}) for f in (found, whole))
            same(a, e, tolerance=1e-10)
    assert calls == [True] * len(names)


@each
def test_steps_carry_on_what_a_series_does(calls, method):
    model, start = system(3, 2, 2, lead=(5,)), beginning(3, 2)
    chosen, y = SwitchingFilter(model, *method), observed(model, 5, 9)
    state = chosen.init(start, batch_shape=(9,))
    for time in range(5):
        state, found = chosen.step(state, y[:, time], time=time)
    whole = chosen.filter(y, start)
    same(found, Filtered(*(field[:, -1] for field in whole[:-1]), whole.log_likelihood))
    assert calls == [True] * 6


@each
def test_steps_of_one_target_are_those_of_torch(calls, monkeypatch, method):
    """However few they are, they are compiled; unless something is to be differentiated."""
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 1000)
    model, start = system(3, 2, 2), beginning(3, 2)
    chosen, y = SwitchingFilter(model, *method), observed(model, 5)
    y[2, 0] = torch.nan
    state, slow = chosen.init(start), chosen.init(start)
    for observation in y:
        state, found = chosen.step(state, observation)
        few = chosen.step(slow, observation, fields=("mean", "innovation"))[1]
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
            slow, expected = chosen.step(slow, observation)
            by_torch_alone = chosen.step(slow, observation, fields="covariance")[1]
        same(found, expected, tolerance=1e-10)
        torch.testing.assert_close(few.mean, expected.mean)
        assert {name for name, t in few._asdict().items() if t is not None} == {"mean", "innovation", "log_likelihood"}
        assert by_torch_alone.mean is None
    assert calls == [True] * 10
    moved = chosen.step(state, y[0].requires_grad_())[1]
    assert moved.mean.requires_grad
    assert calls == [True] * 10


@each
@pytest.mark.parametrize(("targets", "lead"), [(1, ()), (9, ()), (9, (9, 1)), (9, (1, 1))], ids=str)
def test_what_is_prepared_is_what_steps_call(calls, monkeypatch, method, targets, lead):
    """A step that compiled would come seconds late."""
    asked = []
    worker = switching_cpu.worker
    monkeypatch.setattr(switching_cpu, "worker", lambda *which: (asked.append(which), worker(*which))[1])
    model, start = system(3, 2, 2, lead=lead), beginning(3, 2)
    chosen = SwitchingFilter(model, *method)
    state = chosen.init(start, batch_shape=(targets,))
    prepared = list(asked)
    chosen.step(state, observed(model, 1, targets)[:, 0])
    assert len(prepared) == 1
    assert asked == prepared * 2
    assert calls == [True]


@pytest.mark.parametrize(("k", "targets"), [(2, 1), (3, 1), (5, 2), (8, 3), (9, 1)])
@pytest.mark.parametrize("lead", [(), (6,), (-1, 1)], ids=["constant", "in time", "of targets"])
def test_few_targets_have_the_numbers_of_torch(calls, monkeypatch, k, targets, lead):
    """Modes are in the lanes where they fill more of them than targets do."""
    model, start = system(k, 3, 2, lead=tuple(targets if n < 0 else n for n in lead)), beginning(k, 3)
    y = observed(model, 6, targets)
    y[0, 2, 0], y[-1, 3] = torch.nan, torch.nan
    same(imm(model, y, start), by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


@each
@pytest.mark.parametrize("far", [1.0, 1e3, 1e6])
def test_dead_modes_zero_transitions_and_outliers_stay_exact(calls, monkeypatch, method, far):
    T = torch.tensor([[0.7, 0.3, 0, 0], [0.0, 1.0, 0, 0], [0, 0.1, 0.9, 0], [1.0, 0, 0, 0]], dtype=F64)
    model, start = system(4, 2, 1, transition=T), beginning(4, 2)
    start = replace(start, log_mode_probability=torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=F64).log())
    y = observed(model, 6, 10)
    y[::2, 3] = far * y[::2, 3].sign()
    found = SwitchingFilter(model, *method).filter(y, start)
    assert found.log_mode_probability[..., 3].eq(-torch.inf).all()
    expected = by_torch(monkeypatch, method, model, y, start)
    for name, a, e in zip(Filtered._fields, found, expected, strict=True):  # each to its own size, also at 1e12
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10 * far, msg=lambda m, n=name: f"{n}: {m}")
    assert calls == [True]


def test_a_mode_that_had_no_probability_comes_back(calls, monkeypatch):
    """Its mass is below the least number, and only its logarithm knows it."""
    T = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=F64)
    model, start = system(2, 1, 1, transition=T), beginning(2, 1)
    start = replace(start, log_mode_probability=torch.tensor([0.0, -900.0], dtype=F64))
    y = observed(model, 3, 8)
    found = imm(model, y, start)
    assert found.predicted_log_mode_probability[:, 0, 1].sub(math.log(0.5) - 900).abs().max() < 1e-12
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


def test_what_no_mode_can_produce_goes_the_other_path(calls, monkeypatch):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 4, 3)
    y[1, 2] = 1e200
    found = imm(model, y, start)
    assert found.step_log_likelihood[1, 2] == -torch.inf
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start))
    assert calls == [False]


def test_states_that_do_not_fit_are_not_read(calls):
    model, start = system(2, 2, 1), beginning(2, 2)
    chosen, y = SwitchingFilter(model), observed(model, 1, 5)[:, 0]
    state = replace(chosen.init(start), log_likelihood=torch.zeros(5, dtype=F64))
    with pytest.raises(RuntimeError):  # of torch
        chosen.step(state, y)
    assert calls == [False]


def test_float32_has_the_digits_of_float32(calls):
    model, start = system(3, 2, 2), beginning(3, 2)
    fields = {name: getattr(model, name).float() for name in ("transition", "F", "Q", "H", "R", "b", "d")}
    y = observed(model, 6, 20)
    found = imm(SwitchingModel(**fields), y.float(), tree_map(lambda t: t.float(), start))
    assert {t.dtype for t in found} == {torch.float32}
    same(Filtered(*(t.double() for t in found)), imm(model, y, start), tolerance=1e-4)
    assert calls == [True, True]


def test_two_threads_have_the_bits_of_one(calls):
    model, start = system(3, 4, 2), beginning(3, 4)
    y, threads = observed(model, 30, 40), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = imm(model, y, start)
        torch.set_num_threads(2)
        two = imm(model, y, start)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert calls == [True, True]


def test_layouts_of_memory_do_not_matter(calls):
    model, start = system(3, 2, 2), beginning(3, 2)
    y = observed(model, 5, 4, 6)
    turned = y.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    assert not turned.is_contiguous()
    same(imm(model, turned, start), imm(model, y, start))
    assert calls == [True, True]


def test_what_is_differentiated_is_left_to_torch(calls):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 4, 3)

    def likelihood(observations):
        return imm(model, observations, start).log_likelihood.sum()

    gradient = torch.autograd.grad(likelihood(y.requires_grad_()), y)[0]
    y = y.detach()
    torch.testing.assert_close(torch.func.grad(likelihood)(y), gradient)
    with torch.autograd.forward_ad.dual_level():
        slope = torch.autograd.forward_ad.unpack_dual(likelihood(torch.autograd.forward_ad.make_dual(y, y))).tangent
    torch.testing.assert_close(slope, (gradient * y).sum())
    vmapped = torch.func.vmap(lambda one: imm(model, one, start).mean)(y)
    assert calls == []
    torch.testing.assert_close(vmapped, imm(model, y, start).mean)
    with torch.no_grad():
        assert likelihood(y.requires_grad_()) == likelihood(y.detach())
    assert calls == [True] * 3


@pytest.mark.parametrize("number", ["float64", "float32"])
def test_exponentials_and_logarithms_of_lanes(number):
    """Against long double, over all magnitudes, and where they end."""
    numba = pytest.importorskip("numba")
    width = lanes.lanes_of(number)
    zeros, exp, log, load, store = (
        lanes.nothing(lanes.Lanes(number, width)),
        lanes.exp,
        lanes.log,
        lanes.load,
        lanes.store,
    )

    @numba.njit
    def both(x, y, z, vectors):
        zero = zeros()
        for i in range(vectors):
            store(exp(load(zero, x, i)), y, i)
            store(log(load(zero, x, i)), z, i)

    kind = np.dtype(number)
    generator = np.random.default_rng(0)
    low, high = (-700, 700) if number == "float64" else (-85, 85)
    x = np.concatenate((np.exp(generator.uniform(low, high, 4000)), generator.uniform(low, high, 4000)))
    x = np.concatenate(
        (x, 1 + generator.normal(size=4000) * 1e-3, [0, -math.inf, math.inf, math.nan, -1, 1, -1e30, -0.0])
    )
    x = x[: len(x) // width * width].astype(kind)
    y, z = np.empty_like(x), np.empty_like(x)
    both(x.ctypes.data, y.ctypes.data, z.ctypes.data, len(x) // width)
    with np.errstate(all="ignore"):
        inside = (x > low) & (x < high)
        exact = np.exp(x[inside].astype(np.longdouble))
        assert np.abs(y[inside] / exact - 1).max() < 3 * np.finfo(kind).eps
        positive_x = (x > 0) & np.isfinite(x)
        exact = np.log(x[positive_x].astype(np.longdouble))
        assert np.abs(z[positive_x] - exact).max() < 3 * np.finfo(kind).eps * np.abs(exact).max()
        near = positive_x & (np.abs(x - 1) < 0.1) & (x != 1)
        assert np.abs(z[near] / np.log(x[near].astype(np.longdouble)) - 1).max() < 4 * np.finfo(kind).eps
        assert (y[x < 2 * low] == 0).all()
        assert np.isnan(y[np.isnan(x)]).all()
        np.testing.assert_array_equal(np.isnan(z), np.isnan(x) | (x < 0))
        assert (z[x == 0] == -math.inf).all()
        assert (z[x == math.inf] == math.inf).all()


def test_long_runs_stay_symmetric_and_positive(calls):
    model, start = system(2, 3, 1), beginning(2, 3)
    model = SwitchingModel(
        transition=model.transition,
        F=torch.eye(3, dtype=F64).expand(2, 3, 3) + 0.01 * torch.randn(2, 3, 3, dtype=F64).triu(1),
        Q=1e-6 * positive(2, 3),
        H=model.H,
        R=1e-2 * model.R,
    )
    found = imm(model, observed(model, 100_000), start, keep="last")
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.linalg.eigvalsh(found.mode_covariance).min() > 0
    assert calls == [True]


def test_kernels_are_kept_for_the_next_process_and_do_not_take_each_others_place(tmp_path):
    """One process keeps each, another loads them all: functions of the same name are one function there.

    One that is compiled anew in each process would cost seconds before the first result.
    """
    code = (
        "import sys, torch; from gradlogz import KalmanModel, Prior, SwitchingModel, SwitchingFilter\n"
        "from gradlogz.kernels.filters import dispatch\n"
        "modes = [KalmanModel(*torch.tensor([[[f]], [[0.5]], [[1.0]], [[0.2]]])) for f in (1.0, 0.3)]\n"
        "model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.4, 0.6]]))\n"
        "y, start = torch.randn(30, 10, 1), Prior(torch.zeros(1), torch.eye(1))\n"
        "for method in sys.argv[1:]:\n"
        "    chosen = SwitchingFilter(model, method, depth=1)\n"
        "    dispatch.WORTH_FILTERING = 0\n"
        "    found = chosen.filter(y, start)\n"
        "    dispatch.WORTH_FILTERING = float('inf')\n"
        "    torch.testing.assert_close(found, chosen.filter(y, start), rtol=1e-4, atol=1e-4)\n"
    )
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DEBUG_CACHE": "1"}
    for methods in (["imm"], ["gpb"], ["imm", "gpb"], ["gpb", "imm"]):
        run = [sys.executable, "-c", code, *methods]
        said = subprocess.run(run, env=settings, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        assert ("data saved" in said.stdout) == (len(methods) == 1)
        assert ("data loaded" in said.stdout) == (len(methods) == 2)
