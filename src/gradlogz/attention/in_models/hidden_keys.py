"""Keys that the masks of a model hide: their logit is -inf, the smallest number of a dtype, or -1e4.

Read next: intercepted_calls.py (the calls with these masks), ../masks.py (the masks of `attend`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor

# Logits and mask entries below this belong to hidden keys: -1e4, the smallest number of a dtype, or between.
HIDDEN = -9e3


def hidden(logits: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """True where a logit, or an entry of an additive mask, hides its key."""
    return logits < HIDDEN


def visible_by_logits(logits: Float[Tensor, "b h m n"]) -> Bool[Tensor, "b m n"]:
    """Keys that each query may see in some head."""
    return (~hidden(logits)).any(1)


def visible_by_masks(
    masks: Iterable[Tensor | None], query: Float[Tensor, "*b m d"], key: Float[Tensor, "*bk n d"]
) -> Bool[Tensor, "b #m n"] | None:
    """Keys that each query may see in some head under all masks; None without a mask."""
    visible = None
    for mask in masks:
        if mask is not None and query.ndim == 4:
            mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
            each = (mask if mask.dtype == torch.bool else ~hidden(mask)).any(1)
            visible = each if visible is None else visible & each
    return None if visible is None else visible.expand(max(len(query), len(key)), -1, key.shape[2])


def padded(visible: Bool[Tensor, "b #m n"]) -> Bool[Tensor, "b n"]:
    """Keys that no query sees, in sequences in which every query sees an unbroken run of the others.

    In other sequences the model selects keys, and a key that nobody selects is not padding.
    """
    keys = visible.any(-2)
    counts = keys.long().cumsum(-1)
    first, last = visible.int().argmax(-1), visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
    inside = counts.gather(-1, last) - counts.gather(-1, first) + 1  # a row without keys has first = 0, last = n - 1
    unbroken = (visible.sum(-1) == inside) | ~visible.any(-1)
    return ~keys & unbroken.all(-1, keepdim=True)


class KeyVisibility(NamedTuple):
    """Keys that the rows of a call see: the same in all layers with the same masks, segments and band."""

    visible: Bool[Tensor, "b #m n"] | None  # by masks; None without a mask
    padded: Bool[Tensor, "b n"] | None  # keys that are padding; None without a mask
    by_some_row: Bool[Tensor, "b n"] | None  # keys that some query sees; None without a mask
    position: Int[Tensor, "b #m"] | None  # of the first key of every row; None: 0
    uniform: Float[Tensor, "#b 1 m"] | None  # weight on the first key if all weights of a row were equal

    @classmethod
    def of(cls, visible: Tensor | None, position: Tensor | None, uniform: Tensor | None) -> "KeyVisibility":
        """Return the keys with what follows from the visible ones."""
        if visible is None:
            return cls(None, None, None, position, uniform)
        return cls(visible, padded(visible), visible.any(-2), position, uniform)
