"""Outputs of heads that attend by other weights.

    w_j       = exp(b_j) / sum_i exp(b_i)                       base measure of a row: uniform over its visible keys
    softmax     a_j = w_j exp(u_j) / sum_i w_i exp(u_i)         u_j = beta <q, k_j>: logits; b_j: bias, -inf if masked
    gaussian    a_j = w_j (1 + u_j - mean_w u)                  sum_j a_j v_j = E[v] + Cov(v, k) beta q
    uniform     a_j = w_j                                       sum_j a_j v_j = E[v]

For v = k the Gaussian weights give mu + Sigma q, the attention of Gaussian keys with the mean and covariance of the
visible ones (theory, Corollary 1). They are also the first-order expansion of the softmax in the logits; they sum to 1
and may be negative. Rows are computed in blocks, so that memory is linear in the number of tokens.

Read next: ../predictions/gaussian_measure.py (the same formula as a description), edited_passes.py.
"""

import torch

from ..._typing import Float, Tensor
from ...attention import masks
from ...kernels.attention.scoring import Block, Scoring, cut, grouped, logits, visible
from ..inside.events import AttentionArguments

ROWS = 256  # queries of a block


def gaussian_and_uniform(
    call: AttentionArguments,
) -> tuple[Float[Tensor, "b h m v"], Float[Tensor, "b h m v"]]:
    """Return the outputs of all heads under the Gaussian and the uniform weights; 0 for rows without a visible key."""
    b, h, m, _ = call.query.shape
    n, groups = call.key.shape[2], call.key.shape[1]
    size = (h, m, n)
    sight = masks.sight(call.attn_mask, call.bias, call.segments, lead=torch.Size((b,)), size=size, like=call.query)
    left, right = masks.band(bool(call.is_causal), call.window)
    scoring = Scoring(call.scale, call.softcap, left, right)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query, key, value = (t.to(wide) for t in (call.query, call.key, call.value))
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first in range(0, m, ROWS):
        last = min(first + ROWS, m)
        block = Block(first, last, 0, n)
        shown = visible(sight, scoring, block, m, n, query.device)
        u = logits(query[:, :, first:last], key, None, None, scoring)
        bias = torch.zeros_like(u) if sight.bias is None else cut(sight.bias, block).to(wide).expand_as(u)
        base = bias if shown is None else bias.masked_fill(~shown, -torch.inf)
        w = torch.where((base > -torch.inf).any(-1, keepdim=True), base, 0.0).softmax(-1)
        w = torch.where(base > -torch.inf, w, 0.0)  # rows without a visible key have no weights
        for weights, rows in zip((w * (1 + u - (w * u).sum(-1, keepdim=True)), w), outputs, strict=True):
            rows.append((grouped(weights, groups) @ value).reshape(b, h, last - first, -1))
    gaussian, uniform = (torch.cat(rows, 2).to(call.value.dtype) for rows in outputs)
    return gaussian, uniform


def with_head(
    output: Float[Tensor, "b h m v"], head: int | None, other: Float[Tensor, "#b h #m v"]
) -> Float[Tensor, "b h m v"]:
    """Return the outputs with those of one head, or of all heads if None, replaced."""
    if head is None:
        return other.expand_as(output).clone()
    changed = output.clone()
    changed[:, head] = other.expand_as(output)[:, head]
    return changed
