"""A series filtered in blocks is the series filtered step by step."""

import math

import pytest
import torch

from gradlogz import Prior, Series, SwitchingModel
from gradlogz.filters import Filtered, Generator, constant_velocity, coordinated_turn, filter_in_blocks, gpb2, imm
from gradlogz.kernels.filters import dispatch
from support.measure_registry import Source

F64 = torch.float64
SEQUENTIAL = {"imm": imm, "gpb2": gpb2}


@pytest.fixture(autouse=True, params=[0, math.inf], ids=["compiled", "torch"])
def path(monkeypatch, request):
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", request.param)


def tracks(t, *, modes=3, is_continuous=False):
    numbers = {"spectral_density": 0.1, "observation_variance": 0.5, "dtype": F64}
    if not is_continuous:
        numbers["dt"] = 1.0
    motions = [constant_velocity(2, **numbers), *(coordinated_turn(2, rate=w, **numbers) for w in (0.2, -0.2))][:modes]
    k = len(motions)
    rate = 0.1 * (torch.ones(k, k, dtype=F64) / k - torch.eye(k, dtype=F64))
    model = SwitchingModel.of(motions, transition=Generator(rate) if is_continuous else torch.eye(k, dtype=F64) + rate)
    g = Source(t)
    y = g.normal(t, 2).cumsum(0) + g.normal(t, 2)
    return model, y, Prior(torch.zeros(4, dtype=F64), 10 * torch.eye(4, dtype=F64)), g


def alike(result, expected, tolerance):
    for name, a, b in zip(Filtered._fields, result.filtered, expected, strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), name
        scale = 1 + float(b[finite].abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale, equal_nan=True, msg=name)


@pytest.mark.parametrize("method", ["imm", "gpb2"])
@pytest.mark.parametrize("modes", [1, 3])
def test_all_fields_are_those_of_the_filter_up_to_the_discrepancy(method, modes):
    """300 steps in blocks of 64, the last one short; a gap at the start of a block and one across it."""
    model, y, prior, _ = tracks(300, modes=modes)
    y[64:66], y[190:195, 0] = torch.nan, torch.nan
    result = filter_in_blocks(model, y, prior, method=method, block=64, overlap=48, fields=None)
    assert result.discrepancy.shape == (4,)
    assert float(result.discrepancy.max()) <= 1e-9
    alike(result, SEQUENTIAL[method](model, y, prior), 1e-8)


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_repairs_end_with_the_filter_itself(method):
    """Without overlap every block begins with the prior; at tolerance 0 nothing is left to repair."""
    model, y, prior, _ = tracks(90)
    result = filter_in_blocks(model, y, prior, method=method, block=8, overlap=0, tolerance=0.0, fields=None)
    assert 0 < result.repairs <= 11
    assert float(result.discrepancy.max()) == 0.0
    alike(result, SEQUENTIAL[method](model, y, prior), 1e-12)
    rough = filter_in_blocks(model, y, prior, method=method, block=8, overlap=0, tolerance=math.inf)
    assert rough.repairs == 0
    assert float(rough.discrepancy.max()) > 1


def test_models_may_change_with_time():
    model, y, prior, g = tracks(100, is_continuous=True)
    times = (0.1 + g.positive(100)).cumsum(0)
    series = Series(y, times=times, mask=g.positive(100) > 0.3)
    result = filter_in_blocks(model, series, prior, block=32, overlap=0, tolerance=0.0, fields=None)
    alike(result, imm(model, series, prior), 1e-12)
    short = filter_in_blocks(model, Series(y[:5], times=times[:5]), prior, fields=None)  # one block
    alike(short, imm(model, Series(y[:5], times=times[:5]), prior), 1e-12)
    assert short.discrepancy.shape == (0,)
