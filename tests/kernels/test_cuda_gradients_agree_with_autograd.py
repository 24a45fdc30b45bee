"""The CUDA source of gradients, compiled for the host, gives those of automatic differentiation of the torch path.

Threads run one after the other here; tests/device/test_the_fused_filters_on_a_gpu.py runs the same on a GPU.
"""

import ctypes
import dataclasses
import shutil
import subprocess
from functools import cache

import pytest
import torch

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel
from gradlogz.filters import Generator, constant_velocity
from gradlogz.filters.gaussian import compiled_gradient
from gradlogz.kernels.filters import dispatch, gpu_gradients
from support.cuda_on_the_host import BEFORE, Host
from support.switching_oracles import F64, beginning, chain, observed, system

compiler = shutil.which("g++")
pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")
each = pytest.mark.parametrize("method", ["imm", "gpb"])
FIELDS = ("transition", "F", "Q", "H", "R", "b", "d")
INITIAL = ("mean", "covariance", "log_mode_probability")
SYMMETRIC = ("Q", "R", "covariance")
AFTER = """
extern "C" void run(int blocks, const GradientProblem* problem) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) differentiate_all(*problem);
}
"""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Kernels by their sizes."""
    folder = tmp_path_factory.mktemp("cuda")

    @cache
    def compiled(sizes, device):
        source = BEFORE + gpu_gradients.source_of(sizes) + AFTER
        path = folder / "_".join(map(str, sizes))
        path.with_suffix(".cpp").write_text(source)
        flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, path.with_suffix(".cpp"), "-o", path.with_suffix(".so")], check=True)
        return Host(ctypes.CDLL(path.with_suffix(".so")), gpu_gradients.THREADS)

    return compiled


@pytest.fixture
def calls(monkeypatch, built):
    """Let the kernel take everything, and count what it finished."""
    finished = []
    differentiate = gpu_gradients.differentiate

    def counted(*arguments):
        slopes = differentiate(*arguments)
        finished.append(slopes is not None)
        return slopes

    def kernel(tensors, filters, **_):
        return gpu_gradients if any(t is not None and t.requires_grad for t in tensors) else None

    compiled_gradient._is_right.cache_clear()
    monkeypatch.setattr(gpu_gradients, "compiled", built)
    monkeypatch.setattr(gpu_gradients, "differentiate", counted)
    monkeypatch.setattr(compiled_gradient, "gradient_kernel", kernel)
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    yield finished
    compiled_gradient._is_right.cache_clear()


def gradients(model, start, series, method, value=None, learned=None, **more):
    """Gradients of a weighted sum of log likelihoods, or of another value, in all inputs or those that are learned."""

    def leaf(name, tensor):
        return tensor.detach().clone().requires_grad_(learned is None or name in learned)

    fields = {n: leaf(n, t) for n in FIELDS if (t := getattr(model, n)) is not None}
    initial = {n: leaf(n, getattr(start, n)) for n in INITIAL}
    y = leaf("y", series.observations)
    made = SwitchingModel(**fields, validate=False)
    placed = Series(y, mask=series.mask, lengths=series.lengths)
    filtered = SwitchingFilter(made, method).filter(placed, Prior(**initial, per="mode"), **more)
    if value is None:
        total = filtered.log_likelihood
        total = (total * torch.linspace(1, 2, total.numel(), dtype=total.dtype).view(total.shape)).sum()
    else:
        total = value(filtered)
    total.backward()
    results = {n: t.grad for n, t in {**fields, **initial, "y": y}.items()}
    for name in SYMMETRIC:
        results[name] = None if results[name] is None else (results[name] + results[name].mT) / 2
    return total.detach(), results


def alike(monkeypatch, model, start, series, method, tolerance=1e-12, **more):
    total, slopes = gradients(model, start, series, method, **more)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_gradient, "gradient_kernel", lambda *_, **__: None)
        expected, wanted = gradients(model, start, series, method, **more)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for name, slope in wanted.items():
        atol = tolerance * (1 + float(slope.abs().max()))
        torch.testing.assert_close(slopes[name], slope, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (1, 3, 2), (4, 2, 3)])
@pytest.mark.parametrize("targets", [(), (2, 3)], ids=str)
def test_gradients_in_every_input_are_those_of_autograd(calls, monkeypatch, method, k, s, o, targets):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, *targets)
    y[..., 2, 0] = torch.nan
    y[..., 4, :] = torch.nan
    more = {"mask": torch.rand(*targets, 7) > 0.2, "lengths": torch.randint(1, 8, targets)} if targets else {}
    alike(monkeypatch, model, start, Series(y, **more), method)
    assert calls == [True, True]  # the first check, and the gradient


@each
@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, monkeypatch, method, lead):
    T = torch.stack([chain(3) for _ in range(6 * 3)])[: torch.Size(lead).numel()].reshape(*lead, 3, 3)
    model, start = system(3, 2, 2, lead=lead, transition=T), beginning(3, 2)
    alike(monkeypatch, model, start, Series(observed(model, 6, 3)), method)
    assert calls == [True, True]


@each
@pytest.mark.parametrize("steps", [2, 9, 11, 16])
def test_segments_of_the_series_do_not_matter(calls, monkeypatch, method, steps):
    monkeypatch.setattr(gpu_gradients, "WORKSPACE", 0)
    model, start = system(2, 2, 1), beginning(2, 2)
    alike(monkeypatch, model, start, Series(observed(model, steps, 3)), method)
    assert calls == [True, True]


@each
def test_transitions_and_modes_of_probability_zero_have_gradients(calls, monkeypatch, method):
    T = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.0, 0.5, 0.5]], dtype=F64)
    model, start = system(3, 2, 2, transition=T), beginning(3, 2)
    alike(monkeypatch, model, start, Series(observed(model, 6, 9)), method)
    assert calls == [True, True]


@each
def test_impossible_modes_far_above_the_others_have_finite_gradients(calls, monkeypatch, method):
    """Where T_ij = 0, the derivative contains exp(log h_i - log c_j), which overflows."""
    model, start = system(3, 2, 2, transition=torch.eye(3, dtype=F64)), beginning(3, 2)
    d = model.d.clone()
    d[1] += 300.0
    model = dataclasses.replace(model, d=d)
    alike(monkeypatch, model, start, Series(observed(model, 6, 9)), method)
    _, slopes = gradients(model, start, Series(observed(model, 6, 9)), method)
    assert all(slope.isfinite().all() for slope in slopes.values())
    impossible = dataclasses.replace(start, log_mode_probability=torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64))
    alike(monkeypatch, model, impossible, Series(observed(model, 6, 9)), method)
    assert calls == [True] * 4


@each
def test_several_gradients_at_once_take_the_torch_path(calls, monkeypatch, method):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 5, 4)

    def each_target():
        R = model.R.clone().requires_grad_()
        filtered = SwitchingFilter(dataclasses.replace(model, R=R, validate=False), method).filter(y, start)
        return torch.autograd.grad(filtered.log_likelihood, R, torch.eye(4, dtype=F64), is_grads_batched=True)[0]

    found = each_target()
    assert calls == [True]  # the first check alone
    monkeypatch.setattr(compiled_gradient, "gradient_kernel", lambda *_, **__: None)
    torch.testing.assert_close(found, each_target(), rtol=0, atol=1e-12 * float(found.abs().max()))


@each
@pytest.mark.parametrize("name", ["transition", "R", "b", "mean", "log_mode_probability", "y"])
def test_inputs_that_need_no_gradient_change_nothing(calls, method, name):
    model, start = system(2, 2, 1), beginning(2, 2)
    series = Series(observed(model, 5, 4))
    every = gradients(model, start, series, method)[1]
    one = gradients(model, start, series, method, learned=(name,))[1]
    assert [n for n, slope in one.items() if slope is not None] == [name]
    assert torch.equal(one[name], every[name])
    assert calls == [True] * 3


@each
def test_other_fields_and_second_derivatives_take_the_torch_path(calls, monkeypatch, method):
    model, start = system(2, 2, 1), beginning(2, 2)
    series = Series(observed(model, 5, 4))

    def means(filtered):
        return (filtered.mean.square().sum() + filtered.log_likelihood.sum()) / 10

    alike(monkeypatch, model, start, series, method, value=means)
    assert calls == [True]

    def curvature(R):
        made = SwitchingModel(**{n: getattr(model, n) for n in FIELDS if n != "R"}, R=R, validate=False)
        total = SwitchingFilter(made, method).filter(series, start, fields=()).log_likelihood.sum()
        (slope,) = torch.autograd.grad(total, R, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), R)[0]

    found = curvature(model.R.clone().requires_grad_())
    with monkeypatch.context() as patch:
        patch.setattr(compiled_gradient, "gradient_kernel", lambda *_, **__: None)
        expected = curvature(model.R.clone().requires_grad_())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_series_that_are_filtered_in_parts_have_gradients(calls, monkeypatch):
    """Each part of a series passes the gradient in its first state to the part before."""
    modes = [constant_velocity(1, spectral_density=q, observation_variance=0.5, dtype=F64) for q in (0.1, 3.0)]
    model = SwitchingModel.of(modes, transition=Generator(torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)))
    series = Series(torch.randn(2, 70, 1, dtype=F64), times=torch.rand(2, 70, dtype=F64).cumsum(-1))
    start = beginning(2, 2)

    def slopes():
        R, mean = model.R.clone().requires_grad_(), start.mean.clone().requires_grad_()
        made, prior = dataclasses.replace(model, R=R, validate=False), dataclasses.replace(start, mean=mean)
        total = SwitchingFilter(made).filter(series, prior, keep="last", fields=()).log_likelihood.sum()
        return torch.autograd.grad(total, (R, mean))

    found = slopes()
    assert calls == [True] * 3  # the first check, and the gradients of two parts
    monkeypatch.setattr(compiled_gradient, "gradient_kernel", lambda *_, **__: None)
    for slope, expected in zip(found, slopes(), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12 * (1 + float(expected.abs().max())))


def test_float32_has_the_digits_of_float32(calls, monkeypatch):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 6, 20)
    _, wanted = gradients(model, start, Series(y), "imm")
    single = SwitchingModel(**{n: getattr(model, n).float() for n in FIELDS})
    low = Prior(*(getattr(start, n).float() for n in INITIAL), per="mode")
    _, slopes = gradients(single, low, Series(y.float()), "imm")
    for name, slope in wanted.items():
        atol = 1e-4 * (1 + float(slope.abs().max()))
        torch.testing.assert_close(slopes[name].double(), slope, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert calls == [True] * 4


def test_a_wrong_kernel_is_not_used(calls, monkeypatch):
    differentiate = gpu_gradients.differentiate

    def wrong(*arguments):
        return {name: 1.01 * t for name, t in differentiate(*arguments).items()}

    monkeypatch.setattr(gpu_gradients, "differentiate", wrong)
    model, start = system(2, 2, 1), beginning(2, 2)
    series = Series(observed(model, 5, 4))
    with pytest.warns(RuntimeWarning, match="wrong"):
        alike(monkeypatch, model, start, series, "imm")
    assert calls == [True]  # the first check alone


def test_numbers_that_are_not_finite_take_the_torch_path(calls, monkeypatch):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 4, 3)
    y[1, 2] = 1e200
    made = SwitchingModel(**{n: getattr(model, n) for n in FIELDS}, validate=False)
    value = SwitchingFilter(made).filter(y.requires_grad_(), start).log_likelihood
    assert type(value.grad_fn).__name__ != "_StepsBackward"
    assert calls == [True]
