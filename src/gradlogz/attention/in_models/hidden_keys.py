"""Keys that the masks of a model hide: their logit is -inf, the smallest number of a dtype, or -1e4.

Read next: intercepted_calls.py (the calls with these masks), ../masks.py (the masks of `attend`).
"""

from collections.abc import Iterable

import torch

from ..._typing import Bool, Float, Tensor

# Logits and mask entries below this belong to hidden keys: -1e4, the smallest number of a dtype, or between.
HIDDEN = -9e3


def hidden(logits: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """True where a logit, or an entry of an additive mask, hides its key."""
    return logits < HIDDEN


def visible_by_logits(logits: Float[Tensor, "b h m n"]) -> Bool[Tensor, "b n"]:
    """Keys that some query of their sequence may see, [b, n]."""
    return (~hidden(logits)).any(-2).any(1)


def visible_by_masks(
    masks: Iterable[Tensor | None], query: Float[Tensor, "*b m d"], key: Float[Tensor, "*bk n d"]
) -> Bool[Tensor, "b n"] | None:
    """Keys that some query of their sequence may see under all masks, [b, n]; None without a mask."""
    visible = None
    for mask in masks:
        if mask is not None and mask.ndim == query.ndim == 4:
            each = (mask if mask.dtype == torch.bool else ~hidden(mask)).any(-2).any(1)
            visible = each if visible is None else visible & each
    return None if visible is None else visible.expand(max(len(query), len(key)), key.shape[2])
