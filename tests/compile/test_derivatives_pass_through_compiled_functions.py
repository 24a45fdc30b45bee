"""Compiled attention has first derivatives, and the transforms of torch.func run inside compiled functions."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

from support.measure_registry import NAMES, case
from support.scales import close, scale_of

KINDS = sorted({type(case(name).measure): name for name in reversed(NAMES)}.values())


def backward(function, h, eta, vector):
    """The value and its gradients in the query and in every tensor of the measure."""
    h = pytree.tree_map(lambda t: t.detach().clone().requires_grad_(), h)
    eta = eta.detach().clone().requires_grad_()
    value = function(h, eta, vector)
    tensors = [eta, *pytree.tree_leaves(h)]
    return [value.detach(), *torch.autograd.grad(value, tensors, materialize_grads=True)]


def along(h, eta, vector):
    return (h.mean(eta) * vector).sum()


def scale(h, eta, vector):
    sizes = torch.stack([scale_of(h, eta, order) for order in range(3)]).amax()
    return sizes * (1 + vector.norm(dim=-1).amax())


@pytest.mark.parametrize("name", KINDS)
def test_gradients_pass_through_a_compiled_function(name):
    h, eta, source = case(name)
    vector = source.normal(*eta.shape)
    compiled = torch.compile(along, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(backward(compiled, h, eta, vector), backward(along, h, eta, vector), strict=True):
        close(actual, expected, scale(h, eta, vector))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by inductor itself
@pytest.mark.parametrize("name", ["empirical, weighted", "gaussian", "mixture of gaussians", "sphere"])
def test_gradients_pass_through_code_that_inductor_wrote(name):
    h, eta, source = case(name)
    vector = source.normal(*eta.shape)
    compiled = torch.compile(along, fullgraph=True, backend="inductor")
    for actual, expected in zip(backward(compiled, h, eta, vector), backward(along, h, eta, vector), strict=True):
        close(actual, expected, scale(h, eta, vector))


TRANSFORMS = {
    "grad": lambda h, e, v: grad(lambda x: h.log_normalizer(x).sum())(e),
    "grad in the measure": lambda h, e, v: pytree.tree_leaves(grad(lambda m: (m.mean(e) * v).sum())(h))[0],
    "hessian": lambda h, e, v: hessian(lambda x: h.log_normalizer(x))(e[0]),
    "jacrev": lambda h, e, v: jacrev(h.mean)(e[0]),
    "jvp": lambda h, e, v: jvp(h.mean, (e,), (v,))[1],
    "vmap over queries": lambda h, e, v: vmap(h.mean)(e),
    "vmap over grad": lambda h, e, v: vmap(grad(lambda x, y: (h.mean(x) * y).sum()))(e, v),
}


@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("name", ["empirical", "gaussian", "mixture of gaussians", "gamma"])
def test_transforms_run_inside_a_compiled_function(name, transform):
    h, eta, source = case(name)
    vector, function = source.normal(*eta.shape), TRANSFORMS[transform]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(compiled(h, eta, vector), function(h, eta, vector), scale(h, eta, vector))
