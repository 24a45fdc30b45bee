"""The fields that attend adds on request: against a loop over keys, their gradients and transforms."""

import pytest
import torch

from gradlogz import attend, merge
from gradlogz.attention.row_fields import FIELDS
from support.enumerated_attention import NAMES, cases, enumerated_row_fields


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_they_agree_with_enumeration(name, dtype):
    case = cases(dtype)[name]
    found, expected = attend(*case[:3], **case.options, fields=FIELDS), enumerated_row_fields(case)
    assert torch.equal(found.max_key, expected["max_key"])
    close = 1e-12 if dtype == torch.float64 else 2e-6
    for field in ("min_logit", "first_key_weight"):
        torch.testing.assert_close(getattr(found, field).double(), expected[field], rtol=close, atol=close)


@pytest.mark.parametrize("name", ["plain", "bool mask with an empty row", "grouped heads", "sinks", "everything"])
def test_gradients_are_those_of_finite_differences(name):
    case = cases()[name]
    tensors = {k: t.detach().requires_grad_() for k, t in zip(("query", "key", "value"), case[:3], strict=True)}
    tensors |= {
        k: t.requires_grad_() for k, t in case.options.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    fixed = {k: t for k, t in case.options.items() if k not in tensors}

    def finite(*values):
        found = attend(**dict(zip(tensors, values, strict=True)), **fixed, fields=FIELDS)
        return found.min_logit.masked_fill(found.min_logit.isinf(), 0.0), found.first_key_weight

    assert torch.autograd.gradcheck(finite, tuple(tensors.values()))


def test_what_is_not_asked_for_is_not_there():
    case = cases()["plain"]
    assert attend(*case[:3])[9:] == (None, None, None)
    found = attend(*case[:3], fields=("min_logit",))
    assert found.max_key is None
    assert found.first_key_weight is None
    assert found.min_logit is not None
    every = attend(*case[:3], fields=FIELDS)
    assert merge(every, every)[9:] == (None, None, None)
    assert all(torch.equal(one, other) for one, other in zip(every[:6], attend(*case[:3])[:6], strict=True))


def test_transforms_return_them():
    q, k, v = (torch.randn(3, 2, 2, 6, 8, dtype=torch.float64) for _ in range(3))

    def fields(q, k, v):
        found = attend(q, k, v, is_causal=True, fields=FIELDS)
        return found.max_key, found.min_logit, found.first_key_weight

    expected = [torch.stack(one) for one in zip(*(fields(*three) for three in zip(q, k, v, strict=True)), strict=True)]
    in_batches = torch.func.vmap(fields)(q, k, v)
    shared = torch.func.vmap(fields, (0, None, None))(q, k[0], v[0])
    for one, other in zip(in_batches, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for index, one in enumerate(shared):
        torch.testing.assert_close(one[2], fields(q[2], k[0], v[0])[index], rtol=0, atol=1e-12)

    def weight(q):
        return fields(q, k[0], v[0])[2].sum()

    gradient = torch.func.grad(weight)(q[0])
    _, tangent = torch.func.jvp(weight, (q[0],), (v[0],))
    torch.testing.assert_close(tangent, (gradient * v[0]).sum(), rtol=0, atol=1e-12)
