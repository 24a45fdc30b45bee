"""Which keys a mask hides: in somebody's model a hidden logit is -inf, the least number of a dtype, or -1e4.

Read next: intercepted_calls.py (the calls that masks belong to), ../masks.py (the masks of `attend`).
"""

from collections.abc import Iterable

import torch

from ..._typing import Bool, Float, Tensor

# Logits and masks below this are of keys that are not to be seen: -1e4, the least number of a dtype, and between.
HIDDEN = -9e3


def hidden(logits: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Which logits, or entries of an added mask, are of keys that are not to be seen."""
    return logits < HIDDEN


def visible_by_logits(logits: Float[Tensor, "b h m n"]) -> Bool[Tensor, "b n"]:
    """Keys that some query of their sequence may see."""
    return (~hidden(logits)).any(-2).any(1)


def visible_by_masks(
    masks: Iterable[Tensor | None], query: Float[Tensor, "*b m d"], key: Float[Tensor, "*bk n d"]
) -> Bool[Tensor, "b n"] | None:
    """Keys that some query of their sequence may see by all of these masks; None if no mask says so."""
    seen = None
    for mask in masks:
        if mask is not None and mask.ndim == query.ndim == 4:
            each = (mask if mask.dtype == torch.bool else ~hidden(mask)).any(-2).any(1)
            seen = each if seen is None else seen & each
    return None if seen is None else seen.expand(max(len(query), len(key)), key.shape[2])
