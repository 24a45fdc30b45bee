"""The fused switching filters give on a GPU the numbers of the torch path, and step aside where they cannot."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from gradlogz import Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import Filtered
from gradlogz.filters.gaussian import compiled_gradient
from gradlogz.kernels.filters import dispatch, gpu_gradients
from gradlogz.kernels.filters import gpu as switching_gpu
from support.switching_oracles import F64, beginning, chain, observed, same, system

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = {"imm": ("imm", 2), "gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
FIELDS = ("transition", "F", "Q", "H", "R", "b", "d")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Let the kernel take everything, and count what it finished; the CPU is left to torch."""
    finished = []
    forward = switching_gpu.forward

    def counted(*arguments, **more):
        found = forward(*arguments, **more)
        finished.append(found is not None)
        return found

    monkeypatch.setattr(dispatch, "WORTH_FILTERING", math.inf)
    monkeypatch.setattr(dispatch, "WORTH_FILTERING_THERE", 1)
    monkeypatch.setattr(switching_gpu, "forward", counted)
    return finished


def moved(model, dtype=F64):
    fields = {name: getattr(model, name) for name in FIELDS}
    return SwitchingModel(**{name: t if t is None else t.to("cuda", dtype) for name, t in fields.items()})


def there(given, dtype=None):
    return tree_map(lambda t: t.to("cuda", dtype), given)


def back(found):
    return Filtered(*(t.cpu() for t in found))


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (1, 3, 2), (4, 2, 3)])
@pytest.mark.parametrize("targets", [1, 19, 333])
def test_every_field_is_that_of_the_cpu(calls, method, k, s, o, targets):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, targets)
    y[:5, 2, 0] = torch.nan
    y[3:9, 4] = torch.nan
    more = {"mask": torch.rand(targets, 7) > 0.2, "lengths": torch.randint(1, 8, (targets,))}
    found = SwitchingFilter(moved(model), *method).filter(Series(y.cuda(), **there(more)), there(start))
    same(back(found), SwitchingFilter(model, *method).filter(Series(y, **more), start), tolerance=1e-10)
    assert calls == [True]


@each
def test_many_modes_and_large_states_are_taken(calls, method):
    model = system(4, 6, 3) if method == ("gpb", 3) else system(8, 6, 2)
    start = beginning(model.modes, 6)
    y = observed(model, 3, 70)
    found = SwitchingFilter(moved(model), *method).filter(y.cuda(), there(start))
    same(back(found), SwitchingFilter(model, *method).filter(y, start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize("lead", [(6,), (1, 6), (50, 1), (50, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, lead):
    model, start = system(3, 2, 2, lead=lead), beginning(3, 2)
    y = observed(model, 6, 50)
    same(back(imm(moved(model), y.cuda(), there(start))), imm(model, y, start), tolerance=1e-10)
    assert calls == [True]


def test_inputs_enter_as_offsets_and_targets_have_any_shape(calls):
    plain, start = system(2, 3, 2), beginning(2, 3)
    B, D = torch.randn(2, 3, 2, dtype=F64), torch.randn(2, 2, 2, dtype=F64)
    fields = {name: getattr(plain, name) for name in ("transition", "F", "Q", "H", "R")}
    model = SwitchingModel(**fields, B=B, D=D)
    y, u = observed(model, 5, 2, 30), torch.randn(2, 30, 5, 2, dtype=F64)
    turned = y.cuda().permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    on_device = SwitchingModel(**there(fields), B=B.cuda(), D=D.cuda())
    found = imm(on_device, Series(turned, inputs=u.cuda()), there(start))
    same(back(found), imm(model, Series(y, inputs=u), start), tolerance=1e-10)
    assert calls == [True]


@each
def test_steps_carry_on_what_a_series_does(calls, method):
    model, start = system(3, 2, 2, lead=(5,)), beginning(3, 2)
    chosen, y = SwitchingFilter(moved(model), *method), observed(model, 5, 40).cuda()
    state = chosen.init(there(start), batch_shape=(40,))
    for time in range(5):
        state, found = chosen.step(state, y[:, time], time=time)
    last = chosen.filter(y, there(start), keep="last")
    same(back(found), back(last))
    whole = chosen.filter(y, there(start))
    same(back(last), back(Filtered(*(field[:, -1] for field in whole[:-1]), whole.log_likelihood)))
    assert calls == [True] * 7


@each
@pytest.mark.parametrize("far", [1.0, 1e3, 1e6])
def test_dead_modes_zero_transitions_and_outliers_stay_exact(calls, method, far):
    T = torch.tensor([[0.7, 0.3, 0, 0], [0.0, 1.0, 0, 0], [0, 0.1, 0.9, 0], [1.0, 0, 0, 0]], dtype=F64)
    model, start = system(4, 2, 1, transition=T), beginning(4, 2)
    start = replace(start, log_mode_probability=torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=F64).log())
    y = observed(model, 6, 10)
    y[::2, 3] = far * y[::2, 3].sign()
    found = back(SwitchingFilter(moved(model), *method).filter(y.cuda(), there(start)))
    assert found.log_mode_probability[..., 3].eq(-torch.inf).all()
    expected = SwitchingFilter(model, *method).filter(y, start)
    for name, a, e in zip(Filtered._fields, found, expected, strict=True):  # each to its own size, also at 1e12
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10 * far, msg=lambda m, n=name: f"{n}: {m}")
    assert calls == [True]


def test_what_no_mode_can_produce_goes_the_other_path(calls):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 4, 40)
    y[1, 2] = 1e200
    found = back(imm(moved(model), y.cuda(), there(start)))
    assert found.step_log_likelihood[1, 2] == -torch.inf
    same(found, imm(model, y, start), tolerance=1e-10)
    assert calls == [False]


def test_what_has_no_density_is_an_error_still(calls):
    model, start = system(2, 2, 1), beginning(2, 2)
    fields = {name: getattr(model, name).cuda() for name in FIELDS}
    flat = SwitchingModel(**{**fields, "H": fields["H"] * 0, "R": fields["R"] * 0})
    with pytest.raises(ValueError, match="positive definite"):
        imm(flat, observed(model, 4, 40).cuda(), there(start))
    assert calls == [False]


def test_float32_has_the_digits_of_float32(calls):
    model, start = system(3, 2, 2), beginning(3, 2)
    y = observed(model, 6, 200)
    found = imm(moved(model, torch.float32), y.float().cuda(), there(start, torch.float32))
    assert {t.dtype for t in found} == {torch.float32}
    same(Filtered(*(t.double() for t in back(found))), imm(model, y, start), tolerance=1e-4)
    assert calls == [True]


@each
def test_only_what_is_wanted_is_reported(calls, method):
    wanted = ("mean", "mode_innovation_covariance", "log_mode_probability")
    model, start = system(3, 4, 2), beginning(3, 4)
    chosen, y = SwitchingFilter(moved(model), *method), observed(model, 4, 50).cuda()
    whole = chosen.filter(y, there(start))
    found = chosen.filter(y, there(start), fields=wanted)
    for name, a, e in zip(Filtered._fields, found, whole, strict=True):
        assert (a is not None) == (name in (*wanted, "log_likelihood"))
        if a is not None:
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    assert calls == [True, True]


def test_other_streams_are_taken_and_recorded_graphs_left_to_torch(calls):
    model, start = moved(system(2, 2, 1)), there(beginning(2, 2))
    y = observed(model, 4, 1000).cuda()
    expected = imm(model, y, start)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        later = imm(model, y + 0, start)
    torch.cuda.current_stream().wait_stream(stream)
    same(back(later), back(expected))
    assert calls == [True, True]
    unchecked = SwitchingModel(**{name: getattr(model, name) for name in FIELDS}, validate=False)
    state = SwitchingFilter(unchecked).init(start, batch_shape=(1000,))
    with torch.cuda.stream(stream):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            SwitchingFilter(unchecked).step(state, y[:, 0])
    assert calls == []


@pytest.fixture
def gradients(monkeypatch):
    """Count the gradients that the kernel finished."""
    finished = []
    differentiate = gpu_gradients.differentiate

    def counted(*arguments):
        slopes = differentiate(*arguments)
        finished.append(slopes is not None)
        return slopes

    monkeypatch.setattr(gpu_gradients, "differentiate", counted)
    compiled_gradient._is_right.cache_clear()
    return finished


def slopes(model, y, start, method, **more):
    """Gradient of the log likelihoods in the model, the means at time 0 and the observations, on the CPU."""
    fields = {name: getattr(model, name).detach().clone().requires_grad_() for name in FIELDS}
    leaves = [*fields.values(), start.mean.clone().requires_grad_(), y.clone().requires_grad_()]
    made, prior = SwitchingModel(**fields, validate=False), replace(start, mean=leaves[-2])
    total = SwitchingFilter(made, method).filter(Series(leaves[-1], **more), prior).log_likelihood
    return [t.cpu() for t in torch.autograd.grad(total.sum(), leaves)]


@pytest.mark.parametrize("method", ["imm", "gpb"])
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (4, 2, 3)])
@pytest.mark.parametrize("targets", [19, 333])
def test_gradients_are_those_of_the_cpu(gradients, method, k, s, o, targets):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, targets)
    y[:5, 2, 0] = torch.nan
    more = {"mask": torch.rand(targets, 7) > 0.2, "lengths": torch.randint(1, 8, (targets,))}
    on_device = slopes(moved(model), y.cuda(), there(start), method, **there(more))
    for slope, expected in zip(on_device, slopes(model, y, start, method, **more), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-11 * (1 + float(expected.abs().max())))
    assert gradients == [True, True]  # the comparison before the first use, and the gradient


@pytest.mark.parametrize("lead", [(40,), (1, 40), (50, 1), (50, 40)], ids=str)
def test_gradients_of_changing_models_in_segments(monkeypatch, gradients, lead):
    monkeypatch.setattr(gpu_gradients, "WORKSPACE", 0)
    T = torch.stack([chain(3) for _ in range(math.prod(lead))]).reshape(*lead, 3, 3)
    model, start = system(3, 2, 2, lead=lead, transition=T), beginning(3, 2)
    y = observed(model, 40, 50)
    on_device = slopes(moved(model), y.cuda(), there(start), "imm")
    for slope, expected in zip(on_device, slopes(model, y, start, "imm"), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-11 * (1 + float(expected.abs().max())))
    assert gradients == [True, True]


def test_gradients_in_float32_have_its_digits(gradients):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 6, 200)
    on_device = slopes(moved(model, torch.float32), y.float().cuda(), there(start, torch.float32), "imm")
    for slope, expected in zip(on_device, slopes(model, y, start, "imm"), strict=True):
        atol = 1e-4 * (1 + float(expected.abs().max()))
        torch.testing.assert_close(slope.double(), expected, rtol=0, atol=atol)
    assert gradients == [True, True]


def test_gradients_in_other_fields_are_left_to_torch(gradients):
    model, start = moved(system(2, 2, 1)), there(beginning(2, 2))
    y = observed(model, 4, 30).cuda().requires_grad_()
    gradient = torch.autograd.grad(imm(model, y, start).mean.sum(), y)[0]
    assert gradient.isfinite().all()
    assert gradients == [True]  # the comparison alone


def test_long_runs_stay_symmetric_and_positive(calls):
    model, start = system(2, 3, 1), beginning(2, 3)
    fields = {name: getattr(model, name).cuda() for name in FIELDS}
    F = torch.eye(3, dtype=F64).expand(2, 3, 3) + 0.01 * torch.randn(2, 3, 3, dtype=F64).triu(1)
    fields |= {"F": F.cuda(), "Q": 1e-6 * fields["Q"], "R": 1e-2 * fields["R"]}
    found = imm(SwitchingModel(**fields), observed(model, 20_000, 40).cuda(), there(start), keep="last")
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.linalg.eigvalsh(found.mode_covariance).min() > 0
    assert calls == [True]
