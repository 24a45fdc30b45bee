"""Filters compile into one graph, a step and a short series, forward and backward, with gaps or without."""

import pytest
import torch

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import Filtered, Generator, constant_acceleration, constant_velocity
from support.switching_oracles import F64, beginning, observed, same, system

METHODS = {"gpb2": ("gpb", 2), "imm": ("imm", 2)}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_compiles_into_one_graph(method):
    model, start = system(3), beginning(3)
    online = SwitchingFilter(model, method[0], depth=method[1])
    state, y = online.init(start, batch_shape=(4,)), observed(model, 1, 4).squeeze(1)
    y[1, 0] = torch.nan
    compiled = torch.compile(lambda s, y: online.step(s, y), fullgraph=True, backend="aot_eager")
    same(Filtered(*compiled(state, y)[1]), online.step(state, y)[1], 10.0)


def test_a_series_compiles_with_its_gradient():
    model, start = system(2), beginning(2)
    y = observed(model, 2, 4)

    def likelihood(F, y):
        changed = SwitchingModel(model.transition, F, model.Q, model.H, model.R, model.b, model.d, validate=False)
        return imm(changed, y, start).log_likelihood.sum()

    def slopes(function):
        F, z = model.F.clone().requires_grad_(), y.clone().requires_grad_()
        return torch.autograd.grad(function(F, z), (F, z))

    compiled = torch.compile(likelihood, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(slopes(compiled), slopes(likelihood), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    assert expected.dtype == F64


def test_times_and_unequal_sizes_compile():
    noise = {"spectral_density": 0.1, "observation_variance": 1.0, "dtype": F64}
    model = SwitchingModel.of(
        [constant_velocity(1, **noise), constant_acceleration(1, **noise)],
        transition=Generator(torch.tensor([[-0.1, 0.1], [0.2, -0.2]], dtype=F64)),
        components=[(0, 1), range(3)],
    )
    start = Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    y, times = observed(model, 2, 4), torch.rand(4, 2, dtype=F64).cumsum(-1)
    compiled = torch.compile(
        lambda y, t: tuple(imm(model, Series(y, times=t), start)), fullgraph=True, backend="aot_eager"
    )
    same(Filtered(*compiled(y, times)), imm(model, Series(y, times=times), start), 10.0)
