"""What the layers share: tokens split into heads and joined again, and the checks of their sizes.

    [*b, n, h d]  ->  [*b, h, n, d]  ->  attention in each head  ->  [*b, h, n, d]  ->  [*b, n, h d]

Read next: multihead.py, the layer that everyone knows; the others differ from it in the measure of a head.
"""

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Float, Tensor


def split(tokens: Float[Tensor, "*b n hd"], heads: int) -> Float[Tensor, "*b h n d"]:
    """The coordinates of each head by themselves; a view."""
    return tokens.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join(per_head: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b n hd"]:
    """The heads of a token side by side."""
    return per_head.transpose(-3, -2).flatten(-2)


def wide(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_sizes(call: str, embed_dim: int, num_heads: int) -> None:
    """Heads of equal size share the coordinates of a token."""
    if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
        fact = f"embed_dim={embed_dim} and num_heads={num_heads}"
        condition = "embed_dim must be a positive multiple of num_heads"
        raise InputValueError(
            call, "embed_dim", f"{condition}, got {fact}", "Each head has embed_dim / num_heads coordinates."
        )


def check_tokens(call: str, embed_dim: int, **tokens: Tensor) -> None:
    """Every argument is [*b, tokens, embed_dim]."""
    for name, t in tokens.items():
        if t.ndim < 2 or t.shape[-1] != embed_dim:
            condition = f"{name} must be [*b, tokens, embed_dim={embed_dim}]"
            raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", "The batch comes first.")


def check_statistics(call: str, statistics: str) -> None:
    """The moments of keys that are Gaussians are not those of the points that stand for them."""
    if statistics not in ("none", "scalar"):
        condition, remedy = 'statistics must be "none" or "scalar"', "Leave it out for the scalars."
        raise InputValueError(call, "statistics", f"{condition}, got {statistics!r}", remedy)
