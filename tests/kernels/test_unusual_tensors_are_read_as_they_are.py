"""Tensors that are not what they seem: strides, negation, zeros, tracers, subclasses, empty shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from gradlogz import attend


def turned(t):
    """The same numbers with the last dimension not contiguous."""
    return t.mT.contiguous().mT


def gradients(found, operands):
    return torch.autograd.grad(found.output.sin().sum() + found.log_normalizer.sin().sum(), operands)


@pytest.mark.parametrize("statistics", ["none", "scalar", "moments"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "d", "v"), [(7, 7, 8, 4), (1, 100, 16, 16), (7, 9, 4, 4), (70, 90, 8, 16)])
def test_any_stride_of_the_last_dimension(m, n, d, v, dtype, statistics):
    plain = [torch.randn(1, 2, *s, dtype=dtype) for s in ((m, d), (n, d), (n, v))]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    results = []
    for operands in (plain, [turned(t) for t in plain]):
        leaves = [t.detach().requires_grad_() for t in operands]
        found = attend(*leaves, statistics=statistics)
        results.append([*(t for t in found if t is not None), *gradients(found, leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_a_negated_view_is_negated():
    k = torch.randn(1, 1, 64, 1, dtype=torch.cfloat).conj().imag
    assert k.is_neg()
    q, v = torch.randn(1, 1, 64, 1), torch.randn(1, 1, 64, 1)
    torch.testing.assert_close(attend(q, k, v).output, attend(q, k.resolve_neg().clone(), v).output)
    torch.testing.assert_close(attend(q, v, k).output, attend(q, v, k.resolve_neg().clone()).output)


def test_zeros_that_are_nowhere_are_zeros():
    x, zeros = torch.randn(1, 2, 64, 8), torch._efficientzerotensor((1, 2, 64, 8))
    torch.testing.assert_close(attend(x, zeros, x).output, attend(x, torch.zeros_like(x), x).output)


def test_a_tracer_sees_an_operator():
    x, y = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    graph = make_fx(lambda t: attend(t, t, t).output)(x)
    torch.testing.assert_close(graph(y), attend(y, y, y).output)


def test_fake_tensors_have_shapes():
    for tokens in (6, 64):
        with FakeTensorMode():
            x = torch.randn(1, 2, tokens, 8)
            assert attend(x, x, x).entropy.shape == (1, 2, tokens)


def test_a_wrapper_is_opened_by_its_owner():
    x, y = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    both = TwoTensor(x, y)
    found = attend(both, both, both).output
    torch.testing.assert_close(found.a, attend(x, x, x).output)
    torch.testing.assert_close(found.b, attend(y, y, y).output)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 4), (2, 0, 3, 4), (0, 3, 4), (2, 3, 0, 4), (2, 2, 3, 0, 4), (0, 4)], ids=str
)
@pytest.mark.parametrize("statistics", ["none", "scalar", "moments"])
def test_empty_shapes_give_empty_results(shape, statistics):
    q, k = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-2], 5, 4)
    found = attend(q, k, k, statistics=statistics)
    assert found.output.shape == shape
    assert found.log_normalizer.shape == shape[:-1]
    found.output.sum().backward()


def test_an_empty_mask_beside_no_queries():
    q, k = torch.randn(2, 3, 0, 4), torch.randn(2, 3, 5, 4)
    assert attend(q, k, k, attn_mask=torch.ones(2, 1, 0, 5).bool()).output.shape == (2, 3, 0, 4)


@pytest.mark.parametrize("tokens", [4, 60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_choice_of_statistics_tells_the_same(tokens, dtype):
    """Left padding under a causal mask, NaN queries, a float32 bias beside half precision."""
    q, k, v = (torch.randn(2, 2, tokens, 8).to(dtype) for _ in range(3))
    q[0, 1, 2, 0] = torch.nan
    padding = torch.arange(tokens) >= 2
    bias = torch.randn(tokens, tokens) * 100
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-4}[dtype]
    for options in ({"attn_mask": padding, "is_causal": True}, {"attn_mask": padding}, {"bias": bias}, {}):
        none, scalar = (attend(q, k, v, **options, statistics=s) for s in ("none", "scalar"))
        torch.testing.assert_close(none.log_normalizer, scalar.log_normalizer, rtol=0, atol=tolerance, equal_nan=True)
        assert torch.equal(none.output.isnan(), scalar.output.isnan())
