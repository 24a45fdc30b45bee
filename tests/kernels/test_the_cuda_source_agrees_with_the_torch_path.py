"""The CUDA source of switching filters, compiled for the host, gives the numbers of the torch path.

A block is one thread here: what threads of a warp do together is tested where there is a GPU
(tests/device/test_the_fused_filters_on_a_gpu.py).
"""

import ctypes
import math
import shutil
import subprocess
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._pytree import tree_map

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel
from gradlogz.filters import Filtered, filter_in_blocks
from gradlogz.kernels.filters import dispatch
from gradlogz.kernels.filters import gpu as switching_gpu
from support.cuda_on_the_host import BEFORE, Host
from support.switching_oracles import F64, beginning, by_definition, observed, same, system

compiler = shutil.which("g++")
pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")
METHODS = {"imm": ("imm", 2), "gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


AFTER = """
extern "C" void run(int blocks, const Problem* problem) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) filter_all(*problem);
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Kernels by their sizes."""
    folder = tmp_path_factory.mktemp("cuda")

    @cache
    def compiled(sizes, device):
        source = BEFORE + switching_gpu.source_of(sizes._replace(lanes=1)) + AFTER
        path = folder / "_".join(map(str, sizes))
        path.with_suffix(".cpp").write_text(source)
        flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, path.with_suffix(".cpp"), "-o", path.with_suffix(".so")], check=True)
        return Host(ctypes.CDLL(path.with_suffix(".so")))

    return compiled


@pytest.fixture
def calls(monkeypatch, built):
    """Let the kernel take everything, and count what it finished."""
    finished = []
    forward, sizes_of = switching_gpu.forward, switching_gpu.sizes_of

    def counted(*arguments, **more):
        found = forward(*arguments, **more)
        finished.append(found is not None)
        return found

    def alone(*arguments):
        found = sizes_of(*arguments)
        return None if found is None else found._replace(threads=1)

    monkeypatch.setattr(switching_gpu, "sizes_of", alone)
    monkeypatch.setattr(switching_gpu, "compiled", built)
    monkeypatch.setattr(switching_gpu, "forward", counted)
    monkeypatch.setattr(switching_gpu, "prepare", lambda *_, **__: None, raising=False)  # what the CPU is asked for
    monkeypatch.setattr(dispatch, "kernel_module", lambda name, compiler: switching_gpu)
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    return finished


def by_torch(monkeypatch, method, model, y, start, **more):
    """The same by the torch path."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
        return SwitchingFilter(model, *method).filter(y, start, **more)


@each
def test_every_field_is_that_of_the_torch_path(calls, monkeypatch, method):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 7, 19)
    y[:5, 2, 0] = torch.nan
    y[3:9, 4] = torch.nan
    more = {"mask": torch.rand(19, 7) > 0.2, "lengths": torch.randint(1, 8, (19,))}
    found = SwitchingFilter(model, *method).filter(Series(y, **more), start)
    same(found, by_torch(monkeypatch, method, model, Series(y, **more), start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize(("k", "s", "o"), [(2, 1, 1), (1, 3, 2), (4, 2, 3)])
def test_sizes_are_what_they_are(calls, monkeypatch, k, s, o):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 4, 5)
    y[1, 2, 0] = torch.nan
    same(
        SwitchingFilter(model).filter(y, start),
        by_torch(monkeypatch, ("imm", 2), model, y, start),
        tolerance=1e-10,
    )
    assert calls == [True]


@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, monkeypatch, lead):
    model, start = system(3, 4, 2, lead=lead), beginning(3, 4)
    y = observed(model, 6, 3)
    found = SwitchingFilter(model).filter(y, start)
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


def test_models_may_have_no_offsets(calls, monkeypatch):
    model, start = system(3, 4, 2, offsets=False), beginning(3, 4)
    y = observed(model, 3, 2, 3)
    found = SwitchingFilter(model).filter(y, start)
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


def test_one_target_and_many_have_the_same_numbers(calls):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 5, 4)
    many, chosen = SwitchingFilter(model).filter(y, start), SwitchingFilter(model)
    same(chosen.filter(y[2], start), Filtered(*(field[2] for field in many)))
    alone = chosen.filter(y[2], start, keep="last")
    same(alone, Filtered(*(field[2, -1] for field in many[:-1]), many.log_likelihood[2]))
    assert calls == [True] * 3


@each
def test_steps_carry_on_what_a_series_does(calls, method):
    model, start = system(3, 4, 2, lead=(5,)), beginning(3, 4)
    chosen, y = SwitchingFilter(model, *method), observed(model, 5, 9)
    state = chosen.init(start, batch_shape=(9,))
    for time in range(5):
        state, found = chosen.step(state, y[:, time], time=time)
    last = chosen.filter(y, start, keep="last")
    same(found, last)
    whole = chosen.filter(y, start)
    same(last, Filtered(*(field[:, -1] for field in whole[:-1]), whole.log_likelihood))
    assert calls == [True] * 7


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_blocks_of_time_are_lanes_of_one_launch(calls, monkeypatch, method):
    """One launch for the steps before all blocks, one for all blocks, and one for each repair; the last is shorter."""
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 57)
    y[20, 1] = torch.nan
    found = filter_in_blocks(model, y, start, method=method, block=8, overlap=4, tolerance=0.0, fields=None)
    assert calls == [True] * (2 + found.repairs)
    expected = by_torch(monkeypatch, METHODS[method], model, y, start)
    same(found.filtered, expected, tolerance=1e-10)


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
    found = SwitchingFilter(model).filter(y, start)
    assert found.predicted_log_mode_probability[:, 0, 1].sub(math.log(0.5) - 900).abs().max() < 1e-12
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start), tolerance=1e-10)
    assert calls == [True]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("T", [[[0.9, 0.1], [0.1, 0.9]], [[0.9, 0.1], [1.0, 0.0]]], ids=["ergodic", "zero"])
def test_histories_that_were_given_up_and_come_back_have_their_weight(calls, T, depth):
    """An outlier leaves one mode exp(-1e5) of the mass; the next says that it was right."""
    F, Q, H, R = torch.tensor([[1.0, 0.5], [0.01, 0.01], [1.0, 1.0], [0.01, 1.0]], dtype=F64)[..., None, None]
    model = SwitchingModel(torch.tensor(T, dtype=F64), F, Q, H, R)
    start = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    y = torch.tensor([[300.0], [300.0]], dtype=F64)
    found = SwitchingFilter(model, "gpb", depth).filter(y, start)
    same(found, by_definition(model, y, start), tolerance=1e-10)  # logarithms of 1e5 have eleven digits after the point
    assert calls == [True]


def test_filters_deeper_than_the_series_need_no_more_than_it(calls):
    model, start = system(2, 1, 1), beginning(2, 1)
    y = observed(model, 4)
    found = SwitchingFilter(model, "gpb", 30).filter(y, start)
    same(found, by_definition(model, y, start), tolerance=1e-10)
    assert calls == [True]


def test_what_no_mode_can_produce_goes_the_other_path(calls, monkeypatch):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 4, 3)
    y[1, 2] = 1e200
    found = SwitchingFilter(model).filter(y, start)
    assert found.step_log_likelihood[1, 2] == -torch.inf
    same(found, by_torch(monkeypatch, ("imm", 2), model, y, start))
    assert calls == [False]


@pytest.mark.parametrize("more", [{"s": 10}, {"o": 7}, {"k": 300}], ids=str)
def test_what_is_too_large_goes_the_other_path(calls, more):
    model = system(**{"k": 2, **more})
    y = observed(model, 1, 2)
    found = SwitchingFilter(model).filter(y, beginning(model.modes, model.state_size))
    assert found.mean.isfinite().all()
    assert calls == [False]


def test_float32_has_the_digits_of_float32(calls, monkeypatch):
    model, start = system(3, 4, 2), beginning(3, 4)
    fields = {name: getattr(model, name).float() for name in ("transition", "F", "Q", "H", "R", "b", "d")}
    y = observed(model, 6, 20)
    found = SwitchingFilter(SwitchingModel(**fields)).filter(y.float(), tree_map(lambda t: t.float(), start))
    assert {t.dtype for t in found} == {torch.float32}
    expected = by_torch(monkeypatch, ("imm", 2), model, y, start)
    same(Filtered(*(t.double() for t in found)), expected, tolerance=1e-4)
    assert calls == [True]


@each
def test_only_what_is_wanted_is_reported(calls, method):
    wanted = frozenset({"mean", "mode_innovation_covariance", "log_mode_probability"})
    model, start = system(3, 4, 2), beginning(3, 4)
    chosen, y = SwitchingFilter(model, *method), observed(model, 4, 5)
    state = chosen.init(start, batch_shape=(5,))
    whole = chosen.filter(y, start)
    depth = 0 if method[0] == "imm" else method[1]
    found = switching_gpu.forward(
        depth, tuple(model.parameters(None)[:7]), tuple(state), y, None, last=False, wanted=wanted
    )
    for name, a, e in zip(Filtered._fields, found.reported, whole, strict=False):
        assert (a is not None) == (name in wanted)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.log_likelihood, whole.log_likelihood)
