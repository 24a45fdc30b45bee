"""A row whose keys are all hidden by a finite mask counts as one that sees no key, so that a z-loss stays finite."""

import pytest
import torch

from gradlogz import attend

MASKS = [*(torch.finfo(t).min for t in (torch.float32, torch.bfloat16, torch.float16)), -1e9, -torch.inf]


def left_padded(hidden, dtype):
    """Causal mask of 7 tokens, of which the first 3 of the second sequence are padding."""
    visible = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    visible[1, :, :, :3] = False
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", MASKS)
@pytest.mark.parametrize("statistics", ["none", "scalar", "moments"])
def test_a_z_loss_of_seen_rows_is_finite(hidden, dtype, statistics):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 16, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    a = attend(q, k, v, attn_mask=left_padded(hidden, dtype), statistics=statistics)
    expected = torch.ones(2, 3, 7, dtype=torch.bool)
    expected[1, :, :3] = False
    assert torch.equal(a.seen, expected)
    z_loss = a.log_normalizer[a.seen].square().mean()
    z_loss.backward()
    reference = attend(q, k, v, attn_mask=left_padded(-torch.inf, dtype)).log_normalizer[expected].square().mean()
    torch.testing.assert_close(z_loss, reference)
    for actual, gradient in zip((q, k), torch.autograd.grad(reference, (q, k)), strict=True):
        torch.testing.assert_close(actual.grad, gradient)


FIELDS = ("output", "log_normalizer", "entropy", "mean_logit", "logit_variance", "max_logit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", MASKS[:-1])
@pytest.mark.parametrize("sinks", [None, 0.5])
def test_every_derivative_of_seen_rows_is_that_of_hidden_keys(hidden, dtype, sinks):
    """Forward mode, forward over reverse, and twice reverse: no square of a hidden logit may overflow."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, *toward = (torch.randn(2, 3, 7, 4, generator=generator, dtype=dtype) for _ in range(6))
    per_head = None if sinks is None else torch.full((3,), sinks, dtype=dtype)

    def results(hidden):
        def loss(q, k, v, which):
            a = attend(q, k, v, attn_mask=left_padded(hidden, dtype), sinks=per_head)
            seen = [getattr(a, name)[:, :, 3:] for name in which]
            return sum(t.square().sum() + t.sum() for t in seen)

        for name in FIELDS:
            at = [t.clone().requires_grad_() for t in (q, k, v)]
            grads = torch.autograd.grad(loss(*at, (name,)), at, create_graph=True, materialize_grads=True)
            yield torch.func.jvp(lambda *x, name=name: loss(*x, (name,)), (q, k, v), tuple(toward))[1]
            gradient = torch.func.grad(lambda *x, name=name: loss(*x, (name,)))
            yield torch.func.jvp(gradient, (q, k, v), tuple(toward))[1]
            yield from torch.autograd.grad(sum(g.square().sum() for g in grads), at, materialize_grads=True)

    for found, expected in zip(results(hidden), results(-torch.inf), strict=True):
        close = {torch.float32: 1e-4, torch.float64: 1e-12}[dtype] * (1 + float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=0, atol=close)


def test_a_row_of_not_a_number_is_seen():
    q = torch.full((1, 1, 2, 16), torch.nan)
    assert attend(q, q, q).seen.all(), "its loss must be NaN, not absent"
