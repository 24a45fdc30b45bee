"""The variance of the products of a query is that of a loop over its visible keys, whatever the mask."""

import math

import pytest
import torch

from gradlogz.probing.inside.events import AttentionArguments
from gradlogz.probing.predictions.observables.product_variance import BLOCK, product_variance
from support.scales import close

B, H, D = 2, 4, 5
SIZES = [1, BLOCK, 2 * BLOCK + 9]


def masks(n):
    """Arguments of attention that hide keys, with the keys they show, [b, m, n], and log weights."""
    row, col = torch.arange(n).unsqueeze(-1), torch.arange(n)
    causal = (col <= row).expand(B, n, n)
    lengths = torch.tensor([n, max(1, n - 3)])
    shown = (col < lengths.unsqueeze(-1)).unsqueeze(1).expand(B, n, n)
    holes = torch.rand(B, n, n, generator=torch.Generator().manual_seed(1)) < 0.5
    none = torch.ones(B, n, n, dtype=torch.bool)
    bias = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    flat = torch.zeros(n, n, dtype=torch.float64)
    return {
        "none": ({}, none, flat),
        "padding": ({"attn_mask": shown.unsqueeze(1)}, shown, flat),
        "causal": ({"is_causal": True}, causal, flat),
        "causal mask with padding": ({"attn_mask": (causal & shown).unsqueeze(1)}, causal & shown, flat),
        "first keys hidden": ({"attn_mask": (causal & (col >= 2)).unsqueeze(1)}, causal & (col >= 2), flat),
        "window": ({"is_causal": True, "window": (3, 0)}, causal & (col >= row - 3), flat),
        "holes": ({"attn_mask": holes.unsqueeze(1)}, holes, flat),
        "bias": ({"bias": bias}, none, bias),
    }


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("name", masks(1))
@pytest.mark.parametrize("n", SIZES)
def test_the_variance_is_that_of_a_loop(n, name, key_heads):
    generator = torch.Generator().manual_seed(n)
    query = torch.randn(B, H, n, D, generator=generator, dtype=torch.float64)
    key = 100 + torch.randn(B, key_heads, n, D, generator=generator, dtype=torch.float64)
    options, shown, log_weights = masks(n)[name]
    values = product_variance(AttentionArguments(query, key, key, scale=0.3, **options))
    rows = torch.linspace(0, n - 1, min(n, 6)).long().tolist()
    expected = torch.zeros(B, H, len(rows), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for place, i in enumerate(rows):
                keys = [j for j in range(n) if shown[b, i, j]]
                weights = [math.exp(log_weights[i, j]) for j in keys]
                products = [0.3 * float(query[b, h, i] @ key[b, h * key_heads // H, j]) for j in keys]
                total = math.fsum(weights)
                mean = math.fsum(w * s for w, s in zip(weights, products, strict=True)) / total if keys else 0.0
                squares = math.fsum(w * (s - mean) ** 2 for w, s in zip(weights, products, strict=True))
                expected[b, h, place] = squares / total if keys else 0.0
    close(values[:, :, rows], expected, 100.0)  # products are near 100, their rounding errors 1e-14 of that


def test_float32_loses_no_digits_to_an_offset():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 200, 8, generator=generator) + shift for shift in (0.0, 1e3))
    values = product_variance(AttentionArguments(query, key, key, scale=1.0, is_causal=True))
    exact = product_variance(AttentionArguments(query.double(), key.double(), key.double(), scale=1.0, is_causal=True))
    torch.testing.assert_close(values.double()[..., 1:], exact[..., 1:], rtol=1e-3, atol=1e-6)
