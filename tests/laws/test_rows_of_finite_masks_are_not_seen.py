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


def test_a_row_of_not_a_number_is_seen():
    q = torch.full((1, 1, 2, 16), torch.nan)
    assert attend(q, q, q).seen.all(), "its loss must be NaN, not absent"
