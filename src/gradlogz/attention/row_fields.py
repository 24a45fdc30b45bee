"""Fields of a row that `attend` computes only when asked, in one more pass over the logits.

    max_key             argmax_n s_n
    min_logit           min_n s_n
    first_key_weight    p_n of the first key n that the row sees: of the attention sink         [xiao24]

The pass finds keys, and the fields are functions of the gathered keys: their gradients are those of torch.
"""

from collections.abc import Collection

import torch

from .._errors import InputValueError
from .._typing import Float, Int, Tensor
from ..kernels.attention.extreme_keys import extreme_keys
from ..kernels.attention.scoring import Scoring, Sight
from .result import Attention

FIELDS = ("max_key", "min_logit", "first_key_weight")


def check_fields(fields: Collection[str]) -> None:
    """Check the names of fields."""
    if isinstance(fields, str) or not set(fields) <= set(FIELDS):
        remedy = f"Choose from {', '.join(map(repr, FIELDS))}; the other fields are chosen by statistics."
        raise InputValueError("attend", "fields", f"fields must be a tuple of names, got {fields!r}", remedy)


def with_fields(
    result: Attention, fields: Collection[str], q: Tensor, k: Tensor, sight: Sight, scoring: Scoring
) -> Attention:
    """Result with the fields of these names; others are None."""
    max_key, min_key, first_key = extreme_keys(q, k, sight, scoring)
    values: dict[str, Tensor] = {"max_key": max_key}
    if "min_logit" in fields:
        values["min_logit"] = _logit(q, k, sight, scoring, min_key).masked_fill(min_key < 0, torch.inf)
    if "first_key_weight" in fields:
        empty = first_key < 0
        G = result.log_normalizer.masked_fill(empty, 0.0)
        weight = (_logit(q, k, sight, scoring, first_key).to(G.dtype) - G).exp()
        values["first_key_weight"] = weight.masked_fill(empty, 0.0)
    return Attention(*result[:9], *(values[name] if name in fields else None for name in FIELDS))  # type: ignore[arg-type]


def _logit(
    q: Float[Tensor, "b h m d"], k: Float[Tensor, "b hk n d"], sight: Sight, scoring: Scoring, key: Int[Tensor, "b h m"]
) -> Float[Tensor, "b h m"]:
    """Logit of one key for each row; 0 in the place of key -1."""
    (b, h, m, _), hk = q.shape, k.shape[1]
    empty, key = key < 0, key.clamp(min=0)
    batch = torch.arange(b, device=q.device).view(-1, 1, 1)
    head = torch.arange(h, device=q.device).view(-1, 1)
    row = torch.arange(m, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(wide) * k[batch, head // max(1, h // max(1, hk)), key].to(wide)).sum(-1) * scoring.scale
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    if sight.bias is not None:
        shared = (t * 0 if size == 1 else t for t, size in zip((batch, head, row), sight.bias.shape, strict=False))
        s = s + sight.bias[(*shared, key)].to(wide)
    return s.masked_fill(empty, 0.0)
