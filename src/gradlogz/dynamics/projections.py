"""Projections of the deep equilibrium layers, computed in float32 or float64.

Residuals are small differences, which half precision would lose.

Read next: equilibrium_attention.py, monotone_attention.py.
"""

from torch import nn
from torch.nn.functional import linear

from .._typing import Float, Tensor


def projected(projection: nn.Linear, tokens: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n e"]:
    """The projection, computed in the dtype of the tokens."""
    bias = None if projection.bias is None else projection.bias.to(tokens.dtype)
    return linear(tokens, projection.weight.to(tokens.dtype), bias)


def in_heads(tokens: Float[Tensor, "*b n hd"], heads: int) -> Float[Tensor, "B h n d"]:
    """Tokens split into heads, with one batch dimension."""
    n, size = tokens.shape[-2:]
    return tokens.reshape(-1, n, heads, size // heads).transpose(1, 2)
