"""Every layer gives on a GPU what it gives on the CPU, forward and backward, compiled and under autocast."""

import copy

import pytest
import torch

import gradlogz as gz
from support.attention_layers import EMBED_DIM, LAYERS, NAMES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def found(layer, call, x):
    x = x.detach().requires_grad_()
    output = call(layer, x)
    return [t.detach() for t in (output, *torch.autograd.grad(output.sin().sum(), [x, *layer.parameters()]))]


@pytest.mark.parametrize("tokens", [6, 200])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_the_cpu(name, tokens):
    build, call = LAYERS[name]
    layer, x = build(dtype=torch.float64), torch.randn(3, tokens, EMBED_DIM, dtype=torch.float64)
    expected = found(layer, call, x)
    actual = found(copy.deepcopy(layer).float().cuda(), call, x.float().cuda())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-3, atol=1e-3 * float(1 + e.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_nearly_the_same(name):
    build, call = LAYERS[name]
    layer, x = build(device="cuda"), torch.randn(3, 64, EMBED_DIM, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = call(layer, x)
    # bfloat16 has 8 bits, 0.004 of a number: outputs up to 9 are off by 0.005 of 1 + |output| (measured on a CPU).
    torch.testing.assert_close(actual.float(), call(layer, x), rtol=0.03, atol=0.03)


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # of torch, which recommends it
@pytest.mark.parametrize("name", ["multihead, with statistics", "moment, diagonal"])
def test_it_compiles(name):
    build, call = LAYERS[name]
    layer, x = build(device="cuda"), torch.randn(3, 64, EMBED_DIM, device="cuda")
    compiled = torch.compile(call, fullgraph=True)
    for a, e in zip(found(layer, compiled, x), found(layer, call, x), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3 * float(1 + e.abs().max()))


LARGE = {
    "multihead": (
        lambda: gz.MultiheadAttention(128, 2, batch_first=True),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ),
    "moment": (lambda: gz.MomentAttention(128, 2), lambda layer, x: sum(layer(x, x.square()))),
    "mixture": (lambda: gz.MixtureAttention(128, 2), lambda layer, x: layer(x)),
    "mixture, low rank": (lambda: gz.MixtureAttention(128, 2, rank=4), lambda layer, x: layer(x)),
    "gated": (lambda: gz.GatedHeads(128, 2), lambda layer, x: layer(x)),
    "link": (lambda: gz.LinkAttention(128, 2, family="spins"), lambda layer, x: layer(x.tanh())),
}


@pytest.mark.parametrize("name", LARGE)
def test_heads_that_the_kernels_take_agree(name):
    """Head size 64: lifted keys of 128 and values of 320 coordinates."""
    build, call = LARGE[name]
    layer, x = build(), torch.randn(2, 300, 128)
    expected = found(copy.deepcopy(layer).double(), call, x.double())
    for a, e in zip(found(layer.cuda(), call, x.cuda()), expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-2, atol=5e-3 * float(1 + e.abs().max()))
