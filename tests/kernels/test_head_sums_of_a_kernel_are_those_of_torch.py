"""Sums of statistics by the kernel for GPUs are those of torch: counts, sums, squares, extremes of every field."""

import pytest
import torch

from gradlogz.attention import attend
from gradlogz.attention.in_models.first_keys import uniform_weight_of_a_band
from gradlogz.attention.in_models.head_summaries import HeadSums, sums_of
from gradlogz.attention.in_models.intercepted_calls import call_from_attend

head_sums_gpu = pytest.importorskip("gradlogz.kernels.attention.head_sums_gpu", reason="needs Triton")
pytestmark = pytest.mark.usefixtures("bounds_of_loops")
# Sequences, heads, heads of keys, queries, keys, sizes of a query and of a value.
SHAPES = [(2, 4, 2, 70, 70, 16, 24), (1, 2, 1, 9, 150, 40, 16), (3, 1, 1, 130, 130, 64, 64)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(b, h, hk, m, n, d, v, dtype, per_token):
    def draw(heads, tokens, size):
        if per_token:
            return torch.randn(b, tokens, heads, size, device=DEVICE, dtype=dtype).transpose(1, 2)
        return torch.randn(b, heads, tokens, size, device=DEVICE, dtype=dtype)

    return 2 * draw(h, m, d), draw(hk, n, d), draw(hk, n, v)


def by_kernel(operands, result, left, scale):
    q, k, v = operands
    right = 0 if left is not None else None
    uniform = uniform_weight_of_a_band((q.shape[2], k.shape[2]), (left, right), q.device).flatten()
    rows = result.entropy, result.log_normalizer, result.logit_variance, result.max_logit
    return [HeadSums(t.sums, t.ends) for t in head_sums_gpu.head_sums(q, k, v, rows, uniform, scale, left)]


def by_torch(call, result):
    """Sums without a kernel: it is not asked for."""

    class WithoutKernel(type(call)):
        def tables_by_a_kernel(self, _):
            return None

    return sums_of(WithoutKernel(*call), result=result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["contiguous", "per token"])
@pytest.mark.parametrize("left", [None, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_sum_is_that_of_torch(shape, left, per_token, dtype):
    q, k, v = drawn(*shape, dtype, per_token)
    options = {"enable_gqa": True, "scale": 0.3} | ({} if left is None else {"window": (left, 0)})
    call = call_from_attend(q, k, v, **options)
    result = call.attend()
    found, expected = by_kernel((q, k, v), result, left, 0.3), by_torch(call, result)
    for one, other in zip(found, expected.parts(), strict=True):
        assert one.shape == other.shape
        for x, y in ((one.sums, other.sums), (one.ends, other.ends)):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * (1 + float(y.abs().max())))


def test_a_number_that_is_nan_makes_the_sums_of_its_head_nan():
    q, k, v = drawn(2, 3, 3, 70, 70, 16, 16, torch.float32, False)
    result = attend(q, k, v)
    result.entropy[1, 2, 5] = torch.nan
    rows, _ = by_kernel((q, k, v), result, None, 0.25)
    for table, fields in ((rows.sums, [1, 9]), (rows.ends, [0, 8])):
        assert table.isnan().nonzero().tolist() == [[field, 2] for field in fields]


def test_sums_are_the_same_bit_for_bit_when_repeated():
    operands = drawn(2, 4, 2, 300, 300, 32, 32, torch.float32, False)
    result = attend(*operands, enable_gqa=True)
    one, other = (by_kernel(operands, result, None, 0.2) for _ in range(2))
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x.sums, y.sums)
        assert torch.equal(x.ends, y.ends)
