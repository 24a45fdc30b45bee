"""Every layer compiles into one graph, forward and backward."""

import pytest
import torch

from support.attention_layers import EMBED_DIM, LAYERS, NAMES
from support.scales import close


def gradients(function, layer, x):
    x = x.detach().clone().requires_grad_()
    found = function(layer, x)
    return [t.detach() for t in (found, *torch.autograd.grad(found.sin().sum(), [x, *layer.parameters()]))]


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_compile_into_one_graph(name):
    build, call = LAYERS[name]
    layer, x = build(dtype=torch.float64), torch.randn(2, 5, EMBED_DIM, dtype=torch.float64)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(gradients(compiled, layer, x), gradients(call, layer, x), strict=True):
        close(actual, expected, 100.0)


def test_inductor_gives_the_same():
    build, call = LAYERS["multihead, with statistics"]
    layer, x = build(), torch.randn(2, 40, EMBED_DIM)
    compiled = torch.compile(call, fullgraph=True)
    for actual, expected in zip(gradients(compiled, layer, x), gradients(call, layer, x), strict=True):
        close(actual, expected, 100.0)


@pytest.mark.parametrize("name", ["multihead", "moment, diagonal"])
def test_lengths_may_be_dynamic(name):
    build, call = LAYERS[name]
    layer = build(dtype=torch.float64)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 7):
        x = torch.randn(2, tokens, EMBED_DIM, dtype=torch.float64)
        close(compiled(layer, x), call(layer, x), 100.0)
