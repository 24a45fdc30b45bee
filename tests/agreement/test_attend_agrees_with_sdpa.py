"""`attend` and torch's scaled_dot_product_attention give the same output wherever both are defined."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import attend, observe

SHAPES = {
    "two dimensions": ((5, 8), (7, 8), (7, 3)),
    "three dimensions": ((4, 5, 8), (4, 7, 8), (4, 7, 8)),
    "four dimensions": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "five dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "values of another size": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)),
    "keys shared by the batch": ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
    "keys shared by the heads": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "queries shared by the heads": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "two dimensions beside four": ((5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "three dimensions beside four": ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "many tokens": ((1, 2, 300, 16), (1, 2, 333, 16), (1, 2, 333, 16)),
}
MASKS = {
    "none": lambda m, n: None,
    "bool": lambda m, n: (torch.rand(m, n) > 0.5) | torch.eye(m, n, dtype=torch.bool),
    "additive": lambda m, n: torch.randn(m, n),
    "of keys": lambda m, n: (torch.arange(n) < n - 2).unsqueeze(0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_that_of_sdpa(shape, mask, dtype):
    q, k, v = (torch.randn(*s, dtype=dtype) for s in SHAPES[shape])
    attn_mask = MASKS[mask](q.shape[-2], k.shape[-2])
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    for options in ({}, {"scale": 0.3}):
        expected = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        actual = attend(q, k, v, attn_mask=attn_mask, **options).output
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 17, 130])
def test_causal_agrees_for_as_many_queries_as_keys(tokens):
    q, k, v = (torch.randn(2, 3, tokens, 8) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, is_causal=True).output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("m", "n"), [(3, 9), (1, 7), (60, 200)])
def test_causal_is_torchs_lower_right(m, n):
    q, k, v = torch.randn(2, 3, m, 8), torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(m, n))
    torch.testing.assert_close(attend(q, k, v, is_causal=True).output, expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # in torch, for rows without keys
@pytest.mark.parametrize("statistics", ["scalar", "none"])
@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize(("m", "n"), [(12, 12), (3, 9), (9, 3), (60, 200)])
def test_torchs_objects_for_causal_masks_are_taken(m, n, mask, statistics):
    q, k, v = torch.randn(2, 3, m, 8), torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)
    found = attend(q, k, v, attn_mask=mask(m, n), statistics=statistics)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask(m, n))
    seen = found.seen
    assert torch.equal(seen, torch.arange(m).expand(2, 3, m) >= (m - n if mask is causal_lower_right else 0))
    torch.testing.assert_close(found.output[seen], expected[seen], rtol=0, atol=2e-6)


def test_torchs_objects_for_causal_masks_combine_with_windows():
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8)
    both = attend(q, k, k, attn_mask=causal_lower_right(5, 9), window=(2, 0))
    assert torch.equal(both.output, attend(q, k, k, window=(2, 0)).output)


@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_a_model_with_such_a_mask_is_observed(mask):
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return scaled_dot_product_attention(q, k, k, attn_mask=mask(5, 9))

    model, q, k = Attention(), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8)
    expected = model(q, k)
    with observe(model) as observation:
        torch.testing.assert_close(model(q, k), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(observation[""].output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.7])
def test_a_scale_may_be_negative_or_zero(scale):
    q, k, v = (torch.randn(2, 3, 17, 8, dtype=torch.float64) for _ in range(3))
    found = [attend(q, k, v, is_causal=True, scale=scale, statistics=which) for which in ("scalar", "none")]
    for field in ("output", "log_normalizer"):
        one, other = (getattr(result, field) for result in found)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert one.isfinite().all()


def test_decoding_token_by_token_is_attending_at_once():
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    whole = attend(q, k, v, is_causal=True)
    for t in range(12):
        step = attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], is_causal=True)
        for one, all_rows in zip(step[:6], whole[:6], strict=True):
            torch.testing.assert_close(one[:, :, 0], all_rows[:, :, t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("hk", [1, 2, 4])
def test_grouped_heads_agree(hk):
    q, k, v = torch.randn(2, 8, 20, 16), torch.randn(2, hk, 30, 16), torch.randn(2, hk, 30, 16)
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, enable_gqa=True).output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_makes_of_attend_what_it_makes_of_sdpa(dtype):
    q, k, v = (torch.randn(2, 3, 20, 16, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        found, expected = attend(q, k, v), scaled_dot_product_attention(q, k, v)
    assert found.output.dtype == expected.dtype == dtype
    torch.testing.assert_close(found.output, expected, rtol=0, atol=2e-2)
    found.output.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).output.dtype == torch.float64


def test_deterministic_mode_is_obeyed():
    q, k, v = (torch.randn(2, 3, 200, 16, requires_grad=True) for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            found = attend(q, k, v, is_causal=True)
            runs.append(
                torch.autograd.grad(found.output.sum() + found.max_logit.sum() + found.entropy.sum(), (q, k, v))
            )
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [7, 300])
def test_operands_of_any_layout_give_the_same(tokens):
    """Transposed, expanded (stride 0) and sliced operands are what they look like, not what they are in memory."""
    q = torch.randn(2, tokens, 3, 16).transpose(1, 2)
    k = torch.randn(1, 1, tokens, 16).expand(2, 3, tokens, 16)
    v = torch.randn(2, 3, tokens, 33)[..., 1::2]
    found = attend(q, k, v, is_causal=True)
    plain = attend(*(t.contiguous() for t in (q, k, v)), is_causal=True)
    for one, other in zip(found[:6], plain[:6], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_no_queries_give_an_empty_result():
    found = attend(torch.randn(2, 3, 0, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 4), statistics="moments")
    assert found.output.shape == (2, 3, 0, 4)
    assert found.key_mean.shape == (2, 3, 0, 8)
    assert found.entropy.shape == (2, 3, 0)


@pytest.mark.parametrize("tokens", [5, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_not_a_number_spreads_to_its_rows_alone(dtype, tokens):
    q, k, v = (torch.randn(1, 2, tokens, 16, dtype=dtype) for _ in range(3))
    q[0, 1, 3, 0] = torch.nan
    found = attend(q, k, v)
    for field in (found.output.sum(-1), found.log_normalizer, found.entropy, found.logit_variance):
        nan = field.isnan()
        assert bool(nan[0, 1, 3])
        assert int(nan.sum()) == 1


@pytest.mark.parametrize("tokens", [5, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_logits_keep_their_digits(dtype, tokens):
    q, k, v = (torch.randn(1, 2, tokens, 16, dtype=dtype) for _ in range(3))
    s = q.double() @ k.double().mT * 1e4
    found = attend(q, k, v, scale=1e4)
    error = 1e-15 if dtype == torch.float64 else 5e-7
    size = float(s.abs().max())
    torch.testing.assert_close(found.log_normalizer.double(), s.logsumexp(-1), rtol=0, atol=error * size)
    torch.testing.assert_close(found.max_logit.double(), s.amax(-1), rtol=0, atol=error * size)
    assert bool((found.entropy >= 0).all())
    assert bool((found.logit_variance >= 0).all())


def test_moments_of_keys_that_are_values_are_the_same():
    q, k = (torch.randn(2, 3, 50, 16, dtype=torch.float64) for _ in range(2))
    one, other = (attend(q, k, v, is_causal=True, statistics="moments") for v in (k, k.clone()))
    for actual, expected in zip(one, other, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_shapes_are_known_without_numbers():
    q, k, v = (torch.randn(2, 3, n, 8, device="meta") for n in (4, 5, 5))
    found = attend(q, k, v, is_causal=True, statistics="moments")
    assert found.output.is_meta
    assert found.output.shape == (2, 3, 4, 8)
    assert found.key_variance.shape == (2, 3, 4)


def test_a_z_loss_over_the_rows_that_see_a_key_is_finite():
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    padding = torch.tensor([False, False, True, True])
    found = attend(q, k, v, attn_mask=padding, is_causal=True)
    assert found.seen.tolist() == [[[False, False, True, True]] * 2]
    loss = found.log_normalizer[found.seen].square().mean()
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(loss, (q, k)))


def test_a_result_shows_its_shapes():
    found = attend(torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3), statistics="none")
    assert repr(found) == "Attention(output=float32[5, 3], log_normalizer=float32[5])"


def test_segments_of_any_size_are_told_apart():
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    large, small = (attend(q, k, v, segments=torch.tensor([[0, s, 0, s]])).output for s in (2**32, 1))
    assert torch.equal(large, small)


def test_windows_may_be_integers_of_numpy():
    import numpy

    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    assert torch.equal(attend(q, k, v, window=(numpy.int64(1), 0)).output, attend(q, k, v, window=(1, 0)).output)


def test_dropout_acts_on_the_output_alone():
    q, k, v = (torch.randn(2, 4, 60, 8, dtype=torch.float64) for _ in range(3))
    plain = attend(q, k, v, statistics="moments")
    torch.manual_seed(3)
    dropped = attend(q, k, v, dropout_p=0.4, statistics="moments")
    torch.manual_seed(3)
    again = attend(q, k, v, dropout_p=0.4)
    assert torch.equal(dropped.output, again.output)
    for one, other in zip(dropped[1:], plain[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert not torch.allclose(dropped.output, plain.output, atol=1e-3)
    mean = torch.stack([attend(q, k, v, dropout_p=0.4).output for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, plain.output, rtol=0, atol=0.15)


def test_dropout_drops_the_fraction_it_says():
    """With values = identity the output is the weights: each is 0 or 1 / (1 - p) times what it was."""
    q, k = torch.randn(4, 2, 80, 8, dtype=torch.float64), torch.randn(4, 2, 80, 8, dtype=torch.float64)
    v = torch.eye(80, dtype=torch.float64).expand(4, 2, 80, 80)
    weights = attend(q, k, v).output
    factor = attend(q, k, v, dropout_p=0.25).output / weights
    kept = factor > 0
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / 0.75), rtol=1e-9, atol=0)
    assert abs(float(kept.double().mean()) - 0.75) < 4 * (0.25 * 0.75 / kept.numel()) ** 0.5
    # No pattern along rows, columns or heads: each mean is a binomial of its own size.
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        means = kept.double().mean(dims)
        assert float((means - 0.75).abs().max()) < 5 * (0.25 * 0.75 * means.numel() / kept.numel()) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_every_statistic_in_low_precision_are_those_in_float64(dtype):
    q, k, v = (torch.randn(2, 3, 90, 16).to(dtype) for _ in range(3))
    bias = torch.randn(90, 90).to(dtype)

    def gradients(*operands):
        leaves = [t.detach().requires_grad_() for t in operands]
        found = attend(*leaves[:3], bias=leaves[3], is_causal=True)
        return torch.autograd.grad(sum(t.double().sin().sum() for t in found[:6]), leaves)

    wide = gradients(*(t.double() for t in (q, k, v, bias)))
    for actual, expected in zip(gradients(q, k, v, bias), wide, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=size * (1e-2 if dtype == torch.bfloat16 else 1e-5)
        )
