"""A smoother of a short series compiles into one graph, forward and backward."""

import torch

from gradlogz import SwitchingModel, smooth
from support.switching_oracles import beginning, observed, system


def test_a_smoother_compiles_with_its_gradient():
    model, start = system(2), beginning(2)
    y = observed(model, 2, 4)

    def squares(F, y):
        changed = SwitchingModel(model.transition, F, model.Q, model.H, model.R, model.b, model.d, validate=False)
        return smooth(changed, y, start).mean.square().sum()

    def slopes(function):
        F, z = model.F.clone().requires_grad_(), y.clone().requires_grad_()
        return torch.autograd.grad(function(F, z), (F, z))

    compiled = torch.compile(squares, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(slopes(compiled), slopes(squares), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
