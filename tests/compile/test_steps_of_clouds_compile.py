"""A step on a measure and the contractions of a step are part of one graph, with the same numbers and gradients."""

import pytest
import torch

import gradlogz as gz
from gradlogz import Ascent
from gradlogz.dynamics import InverseStep, LayerNorm, Shrinkage
from support.measure_registry import Source
from support.scales import close

s = Source(0)
MU, SIGMA, B, GAIN = s.normal(3), s.covariance(3), s.normal(3, 3), s.normal(3)
H = gz.Gaussian(MU, SIGMA, validate=False)
MIXTURE = gz.Mixture(s.log_simplex(2), gz.Gaussian(s.normal(2, 3), s.covariance(2, 3), validate=False), validate=False)

STEPS = {
    "gaussian keys": lambda x: Ascent(beta=0.4, B=B, keys=H).direction(x)[0],
    "mixture of keys": lambda x: Ascent(beta=0.4, B=B, keys=MIXTURE).direction(x)[0],
    "inverse step": InverseStep(torch.eye(3, dtype=torch.float64) + SIGMA, MU),
    "shrinkage": Shrinkage(0.5),
    "layer norm": LayerNorm(GAIN, MU),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_compiles(name):
    x = s.normal(6, 3)
    compiled = torch.compile(lambda y: STEPS[name](y), fullgraph=True)
    grads = []
    for f in (STEPS[name], compiled):
        y = x.clone().requires_grad_()
        out = f(y)
        out.square().sum().backward()
        grads.append((out.detach(), y.grad))
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs, 100.0 * (1 + float(theirs.abs().max())))
