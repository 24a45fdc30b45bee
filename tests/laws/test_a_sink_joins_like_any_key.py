"""A sink, or a block of keys, joins without a kink where log normalisers are equal, and far away without NaN."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gradlogz import attend, merge


def with_one_more_key(q, k, v, sinks):
    """The sink as a key at 0 with value 0 and a bias."""
    zero = torch.zeros_like(k[..., :1, :])
    bias = torch.cat(
        [
            torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype).expand(*q.shape[:-1], -1),
            sinks.view(-1, 1, 1).expand(*q.shape[:-1], 1),
        ],
        -1,
    )
    return attend(q, torch.cat([k, zero], -2), torch.cat([v, zero], -2), bias=bias, statistics="moments")


@pytest.mark.parametrize("sink", [0.0, -3.0, 50.0])
def test_gradients_at_a_tie_are_those_of_one_more_key(sink):
    """A query of zeros that sees one key has log normaliser 0, exactly that of a sink of 0."""
    q = torch.zeros(1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 1, 4, dtype=torch.float64) for _ in range(2))
    sinks = torch.full((1,), sink, dtype=torch.float64, requires_grad=True)
    for field in ("output", "log_normalizer", "entropy", "mean_logit", "logit_variance", "key_variance"):
        joined, whole = (
            torch.autograd.grad(getattr(f(), field).sum(), (q, sinks), allow_unused=True, materialize_grads=True)
            for f in (
                lambda: attend(q, k, v, sinks=sinks, statistics="moments"),
                lambda: with_one_more_key(q, k, v, sinks),
            )
        )
        for actual, expected in zip(joined, whole, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=field)

    def smooth(q, s):
        found = attend(q, k, v, sinks=s)
        return found.output, found.log_normalizer, found.entropy, found.logit_variance

    assert gradcheck(smooth, (q, sinks))
    assert gradgradcheck(smooth, (q, sinks))


def test_merging_blocks_with_equal_keys_has_the_gradient_of_the_whole():
    q, k = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    v = torch.randn(10, 4, dtype=torch.float64)

    def total(found):
        return found.output.sin().sum() + found.entropy.sin().sum()

    def of_keys(f):
        leaf = k.clone().requires_grad_()
        return torch.autograd.grad(total(f(leaf)), leaf)[0]

    joined = of_keys(lambda x: merge([attend(q, x, v[:5]), attend(q, x, v[5:])]))
    torch.testing.assert_close(joined, of_keys(lambda x: attend(q, torch.cat([x, x]), v)), rtol=0, atol=1e-12)


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    found = attend(q, k, v, sinks=torch.tensor([-torch.inf, 0.0]), statistics="moments")
    for actual, expected in zip(found[:9], attend(q, k, v, statistics="moments")[:9], strict=True):
        torch.testing.assert_close(actual[:, 0], expected[:, 0], rtol=0, atol=1e-12)
    hidden = attend(q, k, v, attn_mask=torch.zeros(5, 5).bool(), sinks=torch.full((2,), -torch.inf))
    assert not hidden.seen.any()
    assert not hidden.mean_logit.any()
    assert not hidden.logit_variance.any()


@pytest.mark.parametrize("sink", [1e30, -3e38])
def test_a_sink_far_away_takes_all_or_nothing(sink):
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    found = attend(q, k, v, sinks=torch.tensor([sink]), statistics="moments")
    assert all(bool(t.isfinite().all()) for t in found[:9])
    torch.testing.assert_close(found.logit_variance, attend(q, k, v).logit_variance * (sink < 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_the_least_numbers_is_not_halved_by_a_block_without_keys(dtype):
    """Hugging Face hides keys by the least finite number: a row of such logits has keys, and a huge log normaliser."""
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    low = torch.full((5, 5), torch.finfo(dtype).min / 4, dtype=dtype)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    alone = attend(q, k, v, bias=low)
    for joined in (
        merge([alone, attend(q, k, v, attn_mask=hidden)]),
        merge([attend(q, k, v, attn_mask=hidden), alone]),
        attend(q, k, v, bias=low, sinks=torch.full((2,), -torch.inf, dtype=dtype)),
    ):
        for name in ("output", "log_normalizer", "entropy", "mean_logit"):
            torch.testing.assert_close(getattr(joined, name), getattr(alone, name), rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_through_a_row_of_the_least_numbers_are_those_of_the_other_block(dtype):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    low = torch.full((5, 5), torch.finfo(dtype).min / 4, dtype=dtype)
    alone = attend(q, k, v)
    joined = merge([alone, attend(q, k, v, bias=low)])
    for name in ("output", "entropy", "log_normalizer"):
        found, expected = (
            torch.autograd.grad(2.5 * getattr(result, name).sum(), (q, k, v), retain_graph=True, allow_unused=True)
            for result in (joined, alone)
        )
        for one, other in zip(found, expected, strict=True):
            other = torch.zeros_like(one) if other is None and one is not None else other
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)
