"""`attend_varlen` is `attend` on each document, with its gradients; documents may be empty."""

from itertools import pairwise

import pytest
import torch

from gradlogz import attend
from gradlogz.attention import attend_varlen

SELF = [0, 3, 3, 10, 11, 30]
CROSS = [0, 5, 9, 9, 12, 26]  # the third document has no keys
OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"window": (2, 1)},
    "soft cap": {"softcap": 2.0, "scale": 0.7},
    "moments": {"statistics": "moments"}, "none": {"statistics": "none"}, "sinks": {"sinks": torch.ones(4).double()},
}  # fmt: skip


def operands(tokens_q, tokens_k, heads=4):
    generator = torch.Generator().manual_seed(0)
    sizes = ((tokens_q, 4, 8), (tokens_k, heads, 8), (tokens_k, heads, 6))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def by_document(q, k, v, boundaries_q, boundaries_k, options):
    """Results of `attend` on each document, arranged as by attend_varlen; without keys zeros and G = -inf."""
    parts = []
    for (i, j), (a, b) in zip(pairwise(boundaries_q), pairwise(boundaries_k), strict=True):
        hidden = a == b
        keys, values = (torch.zeros(1, *t.shape[1:]).to(t) if hidden else t[a:b] for t in (k, v))
        mask = torch.zeros(1, 1, dtype=torch.bool) if hidden else None
        arranged = [t.transpose(0, 1).unsqueeze(0) for t in (q[i:j], keys, values)]
        result = attend(*arranged, enable_gqa=k.shape[1] != q.shape[1], attn_mask=mask, **options)
        parts.append([None if t is None else t.squeeze(0) for t in result])
    output, *rows = [None if fields[0] is None else torch.cat(fields, 1) for fields in zip(*parts, strict=True)]
    return [output.transpose(0, 1), *rows]


def same(found, expected, inputs):
    generator = torch.Generator().manual_seed(1)
    totals = [0.0, 0.0]
    for actual, value in zip(found, expected, strict=True):
        assert (actual is None) == (value is None)
        if actual is not None:
            torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12)
            weights = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for index, t in enumerate((actual, value)):
                totals[index] = totals[index] + (t.masked_fill(t == -torch.inf, 0.0) * weights).sum()
    gradients = [torch.autograd.grad(total, inputs, retain_graph=True) for total in totals]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_document_attends_to_itself(name, heads, dtype):
    q, k, v = operands(30, 30, heads)
    boundaries = torch.tensor(SELF, dtype=dtype)
    expected = by_document(q, k, v, SELF, SELF, OPTIONS[name])
    same(attend_varlen(q, k, v, boundaries, boundaries, 19, 19, **OPTIONS[name]), expected, (q, k, v))
    copied = attend_varlen(q, k, v, boundaries, boundaries.clone(), **OPTIONS[name])
    same(copied, expected, (q, k, v))


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", ["plain", "soft cap", "none", "moments", "sinks"])
def test_a_packed_document_attends_to_other_tokens(name, heads):
    q, k, v = operands(30, 26, heads)
    expected = by_document(q, k, v, SELF, CROSS, OPTIONS[name])
    found = attend_varlen(q, k, v, torch.tensor(SELF), torch.tensor(CROSS), **OPTIONS[name])
    same(found, expected, (q, k, v))


def test_tokens_after_the_last_document_are_one_more():
    q, k, v = operands(30, 30)
    boundaries = torch.tensor([0, 3, 20])
    expected = by_document(q, k, v, [0, 3, 20, 30], [0, 3, 20, 30], {})
    same(attend_varlen(q, k, v, boundaries, boundaries), expected, (q, k, v))


def test_it_compiles_in_one_graph():
    q, k, v = operands(30, 30)
    boundaries = torch.tensor(SELF)
    compiled = torch.compile(attend_varlen, backend="aot_eager", fullgraph=True)
    found = compiled(q, k, v, boundaries, boundaries, is_causal=True)
    same(found, attend_varlen(q, k, v, boundaries, boundaries, is_causal=True), (q, k, v))
