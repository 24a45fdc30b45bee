"""Keys with the largest and the smallest logit of a row, and the first key that it sees, as an operator of torch.

Integers, without derivatives: what depends on them is computed from the gathered keys. A row that sees no key has -1.
"""

from typing import Any

import torch

from ..._typing import Float, Int, Tensor
from ..optional import kernel_module
from . import blocked
from .scoring import Scoring, Sight


def extreme_keys(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    sight: Sight,
    scoring: Scoring,
    *,
    only_largest: bool = False,
) -> tuple[Int[Tensor, "b h m"], Int[Tensor, "b h m"], Int[Tensor, "b h m"]]:
    """Numbers of the keys with the largest logit, with the smallest one, and of the first key, for every row.

    With only_largest the other two may be invalid.
    """
    bias = None if sight.bias is None else sight.bias.detach()
    return _extreme_keys(query.detach(), key.detach(), bias, sight.mask, sight.segments, *scoring, only_largest)


@torch.library.custom_op("gradlogz::extreme_keys", mutates_args=())
def _extreme_keys(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    only_largest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sight, scoring = Sight(bias, mask, segments), Scoring(scale, softcap, left, right)
    kernel = None
    if query.is_cuda and query.dtype is not torch.float64 and 16 <= query.shape[3] <= 256 and query.numel():
        kernel = kernel_module(f"{__package__}.extreme_keys_gpu", "triton")
    if kernel is not None:
        return kernel.extreme_keys(query, key, sight, scoring)
    wide = torch.promote_types(query.dtype, torch.float32)
    if bias is not None:
        sight = sight._replace(bias=bias.to(wide))
    return blocked.extreme_keys(query.to(wide), key.to(wide), sight, scoring, only_largest=only_largest)


@_extreme_keys.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(query.new_empty(query.shape[:-1], dtype=torch.long) for _ in range(3))


@_extreme_keys.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    folded = []
    for t, dim in zip(inputs[:5], in_dims, strict=False):
        if t is not None:
            t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
            t = t.expand(info.batch_size, *t.shape[1:])
        folded.append(t)
    batch = folded[0].shape[1]
    folded = [None if t is None else t.expand(-1, batch, *t.shape[2:]).flatten(0, 1) for t in folded]
    keys = _extreme_keys(*folded, *inputs[5:])
    return tuple(t.unflatten(0, (info.batch_size, batch)) for t in keys), (0, 0, 0)
