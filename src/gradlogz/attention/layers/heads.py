"""Functions that all layers use: split tokens into heads, join heads, check sizes.

    [*b, n, h d]  ->  [*b, h, n, d]  ->  attention in each head  ->  [*b, h, n, d]  ->  [*b, n, h d]

Read next: multihead.py, the standard layer; the others differ from it in the measure of a head.
"""

from typing import Literal

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Float, Tensor


def split(tokens: Float[Tensor, "*b n hd"], heads: int) -> Float[Tensor, "*b h n d"]:
    """Split tokens into heads; a view."""
    return tokens.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join(per_head: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b n hd"]:
    """Concatenate the heads of each token."""
    return per_head.transpose(-3, -2).flatten(-2)


def statistics_of_forward() -> Literal["none", "scalar"]:
    """Statistics of the forward pass of a layer: in training scalars, which `monitor` reads from that pass."""
    return "scalar" if torch.is_grad_enabled() else "none"


def check_sizes(call: str, embed_dim: int, num_heads: int) -> None:
    """Check that the heads divide the coordinates of a token equally."""
    if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
        fact = f"embed_dim={embed_dim} and num_heads={num_heads}"
        condition = "embed_dim must be a positive multiple of num_heads"
        raise InputValueError(
            call,
            "embed_dim",
            f"{condition}, got {fact}",
            "Choose num_heads so that each head has embed_dim / num_heads coordinates.",
        )


def check_tokens(call: str, embed_dim: int, **tokens: Tensor) -> None:
    """Check that every argument is [*b, tokens, embed_dim]."""
    for name, t in tokens.items():
        if t.ndim < 2 or t.shape[-1] != embed_dim:
            condition = f"{name} must be [*b, tokens, embed_dim={embed_dim}]"
            raise InputValueError(
                call, name, f"{condition}, got shape {shape_of(t)}", "Put the batch dimensions first."
            )


def check_statistics(call: str, statistics: str) -> None:
    """Check that no moments are requested: those of Gaussian keys are not those of the points that represent them."""
    if statistics not in ("none", "scalar"):
        condition, remedy = 'statistics must be "none" or "scalar"', "Leave it out for scalar statistics."
        raise InputValueError(call, "statistics", f"{condition}, got {statistics!r}", remedy)
