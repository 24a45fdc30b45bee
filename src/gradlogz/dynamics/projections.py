"""Projections and heads of the layers of this chapter.

Projections of deep equilibrium layers are computed in float32 or float64: residuals are small differences, which half
precision would lose.

Read next: equilibrium_attention.py, monotone_attention.py, block_energy.py.
"""

import math

from torch import nn
from torch.nn.functional import linear

from .._errors import InputValueError
from .._typing import Float, Tensor


def check_heads(call: str, embed_dim: int, num_heads: int) -> None:
    """Check that the heads divide the coordinates of a token equally."""
    if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
        fact = f"embed_dim={embed_dim} and num_heads={num_heads}"
        condition = "embed_dim must be a positive multiple of num_heads"
        remedy = "Choose embed_dim so that each head has embed_dim / num_heads coordinates."
        raise InputValueError(call, "embed_dim", f"{condition}, got {fact}", remedy)


def projected(projection: nn.Linear, tokens: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n e"]:
    """The projection, computed in the dtype of the tokens."""
    bias = None if projection.bias is None else projection.bias.to(tokens.dtype)
    return linear(tokens, projection.weight.to(tokens.dtype), bias)


def in_heads(tokens: Float[Tensor, "*b n hd"], heads: int) -> Float[Tensor, "B h n d"]:
    """Tokens split into heads, with one batch dimension."""
    *lead, n, size = tokens.shape
    return tokens.reshape(math.prod(lead), n, heads, size // heads).transpose(1, 2)
