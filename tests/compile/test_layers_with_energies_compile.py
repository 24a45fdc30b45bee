"""Feed-forward layers and blocks with an energy compile into one graph, forward and backward."""

import pytest
import torch

from gradlogz.dynamics import EnergyBlock, HopfieldFeedForward
from support.scales import close

F64 = torch.float64


def outputs_and_gradients(function, layer, *tensors):
    leaf = tensors[0].detach().clone().requires_grad_()
    output = function(leaf, *tensors[1:])
    return [t.detach() for t in (output, *torch.autograd.grad(output.sin().sum(), [leaf, *layer.parameters()]))]


@pytest.mark.parametrize("activation", ["relu", "gelu", "softmax"])
def test_a_feed_forward_layer_compiles(activation):
    layer, x = HopfieldFeedForward(5, 12, activation=activation, dtype=F64), torch.randn(4, 5, dtype=F64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = zip(outputs_and_gradients(compiled, layer, x), outputs_and_gradients(layer, layer, x), strict=True)
    for actual, expected in pairs:
        close(actual, expected, 100.0)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_block_compiles(fixed):
    block, x = EnergyBlock(6, 2, 20, dtype=F64), torch.randn(2, 4, 6, dtype=F64)
    tensors = (x, torch.randn(2, 5, 6, dtype=F64)) if fixed else (x,)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = outputs_and_gradients(compiled, block, *tensors)
    for actual, expected in zip(found, outputs_and_gradients(block, block, *tensors), strict=True):
        close(actual, expected, 100.0)
