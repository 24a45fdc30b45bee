"""Weight of attention on the first key of every row: that of its sequence, or of its packed document.

    p_mj = exp(s_mj - G_m)      from one logit of the row, once the log normaliser is known

Read next: intercepted_calls.py (the calls), hidden_keys.py (keys that masks hide).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from ...kernels.optional import kernel_module
from .. import masks


class SinkWeights(NamedTuple):
    """Weights of every row on keys that take weight from all: [*b, m], or a shape that broadcasts against it."""

    first_key: Float[Tensor, "*b m"]
    uniform: Float[Tensor, "*#b m"]  # the weight on the first key if all weights were equal
    learned: Float[Tensor, "*b m"]  # the weight on the learned sink, 0 without one


def uniform_weight(
    rows: tuple[int, int],
    band: tuple[int | None, int | None],
    segments: Int[Tensor, "b n"] | None,
    position: Int[Tensor, "b #m"] | None,
    visible: Tensor | None,
    device: torch.device,
) -> Float[Tensor, "#b 1 m"]:
    """Weight of every row on its first key if all keys that it sees had equal weights; `rows` are (m, n)."""
    (m, n), (left, right) = rows, band
    at = torch.arange(n - m, n, device=device).unsqueeze(0)
    first = torch.zeros_like(at) if position is None else position.expand(-1, m)
    last = torch.full_like(first, n - 1)
    if segments is not None:
        firsts = first_of_segments(segments, n)
        sizes = torch.zeros_like(firsts).scatter_add(-1, firsts, torch.ones_like(firsts))
        last = first + sizes.gather(-1, first) - 1
    if right is not None:
        last = torch.minimum(last, at + right)
    begin = first if left is None else torch.maximum(first, at - left)
    count = last - begin + 1
    if visible is not None:
        count = torch.minimum(count, visible.sum(-1))
    return torch.where(begin == first, 1.0 / count.clamp(min=1).double(), 0.0).unsqueeze(1)


@lru_cache(maxsize=16)  # the same for all layers and steps of most models
def uniform_weight_of_a_band(
    rows: tuple[int, int], band: tuple[int | None, int | None], device: torch.device
) -> Float[Tensor, "1 1 m"]:
    """Return the uniform weight without segments, positions or masks; it stays for later calls."""
    weight = uniform_weight(rows, band, None, None, None, torch.device("cpu"))
    launching = kernel_module("gradlogz.kernels.attention.launching", "triton") if device.type == "cuda" else None
    return weight.to(device) if launching is None else launching.kept(weight, device)


def learned_weight(sinks: Tensor | None, log_normalizer: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
    """Weight of every row on the learned logit of its head."""
    G = log_normalizer
    if sinks is None:
        return torch.zeros_like(G)
    return torch.where(G == -torch.inf, 0.0, (sinks.detach().to(G.dtype).unsqueeze(-1) - G).exp())


def first_of_segments(segments: Int[Tensor, "b n"], rows: int) -> Int[Tensor, "b m"]:
    """Position of the first key with the segment of each row; the rows are the last keys."""
    order = segments.argsort(stable=True)
    sorted_segments = segments.gather(-1, order)
    begins = torch.ones_like(sorted_segments, dtype=torch.bool)
    begins[..., 1:] = sorted_segments[..., 1:] != sorted_segments[..., :-1]
    ranks = torch.arange(segments.shape[-1], device=segments.device)
    first = order.gather(-1, torch.where(begins, ranks, 0).cummax(-1).values)
    return torch.empty_like(order).scatter(-1, order, first)[..., -rows:]


def weight_on_key(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*bk n d"],
    log_normalizer: Float[Tensor, "*b m"],
    position: Int[Tensor, "b #m"] | None,
    options: dict[str, Any],
) -> Float[Tensor, "*b m"]:
    """Weight of every row on the key at a position of its sequence, by default the first; `options` are of `attend`.

    With a position, query and key are four-dimensional, and a segment contains its position.
    """
    m, n, d = query.shape[-2], key.shape[-2], query.shape[-1]
    G, segments = log_normalizer, options.get("segments")
    at: Tensor | int = 0
    if position is None:
        one_key = key[..., :1, :]
    else:
        at = position.unsqueeze(1)
        index = position[:, None, :, None].expand(-1, key.shape[1], -1, d)
        one_key = key.expand(len(position), -1, -1, -1).gather(2, index)
    if query.ndim >= 3 and one_key.ndim >= 3 and one_key.shape[-3] not in (1, query.shape[-3]):
        one_key = one_key.repeat_interleave(query.shape[-3] // one_key.shape[-3], -3)
    scale, softcap = options.get("scale"), options.get("softcap")
    s = (query.to(G.dtype) * one_key.to(G.dtype)).sum(-1) * (d**-0.5 if scale is None else float(scale))
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    left, right = masks.band(bool(options.get("is_causal")), options.get("window"))
    if left is not None:
        s = s.masked_fill(torch.arange(n - m - left, n - left, device=query.device) > at, -torch.inf)
    if right is not None and (position is not None or n - m + right < 0):  # else every row sees the first key
        s = s.masked_fill(torch.arange(n - m + right, n + right, device=query.device) < at, -torch.inf)
    if segments is not None and position is None:
        same = segments[..., :1] == segments[..., n - m :]
        s = s.masked_fill(~(same.unsqueeze(-2) if s.ndim > 1 else same), -torch.inf)
    for mask in (options.get("attn_mask"), options.get("bias")):
        if mask is not None:
            column = _column(mask, position, n)
            s = s.masked_fill(~column, -torch.inf) if column.dtype == torch.bool else s + column.to(s.dtype)
    return torch.where(G == -torch.inf, 0.0, (s - G).exp())


def _column(mask: Tensor, position: Int[Tensor, "b #m"] | None, n: int) -> Tensor:
    """Entries of a mask [*#b, #h, #m, #n] for one key of each row."""
    mask = mask.expand(*mask.shape[:-1], n)
    if position is None:
        return mask[..., 0]
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    rows = max(mask.shape[2], position.shape[1])
    index = position[:, None, :, None].expand(-1, mask.shape[1], rows, -1)
    return mask.expand(len(position), -1, rows, -1).gather(-1, index).squeeze(-1)
