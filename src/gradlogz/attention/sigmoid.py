"""Sigmoid attention: every key is taken or left on its own.

    s_mn   = scale <q_m, k_n> + bias_mn + b              logit; b = -log of the number of visible keys  [ramapuram24]
    G_m    = sum_n log(1 + exp s_mn)                     log normaliser of independent bits z_n in {0, 1}
    output = sum_n w_mn v_n,   w = sigmoid(s)            mean of sum_n z_n v_n: the gradient of G in omega [theory 3.9]
    H_m    = sum_n h(w_mn) = G_m - sum_n w_mn s_mn       entropy of the bits

Softmax attention draws one of n keys; sigmoid attention draws a subset, and attends to its sum. It is attention to the
2^n sums of subsets, the convolution of the measures delta_0 + exp(b) delta_{k_n}. Keys do not compete, and results over
blocks of keys are added.

Read next: linear.py, result.py (the same statistics of one key), layers/sigmoid.py.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import softplus

from .._autocast import autocast_disabled
from .._errors import InputValueError
from .._typing import Bool, Float, Tensor
from ..kernels.losses.rowwise import Part, rowwise
from . import masks
from .operands import Operands, operands


class SigmoidAttended(NamedTuple):
    """Output of sigmoid attention and statistics of its rows, those of independent bits z_n.

    Without keys all are 0, but for max_logit.

    Attributes:
        output: sum_n w_n v_n.
        log_normalizer: G = sum_n log(1 + exp s_n).
        entropy: sum_n h(w_n), in nats, from 0 to n log 2.
        mean_logit: E = sum_n w_n s_n = G - entropy.
        logit_variance: sum_n w_n (1 - w_n) s_n², the variance of sum_n z_n s_n.
        max_logit: max_n s_n, -inf without keys.
        total_weight: sum_n w_n, the expected number of keys; 1 for softmax.
    """

    output: Float[Tensor, "*b m v"]
    log_normalizer: Float[Tensor, "*b m"] | None = None
    entropy: Float[Tensor, "*b m"] | None = None
    mean_logit: Float[Tensor, "*b m"] | None = None
    logit_variance: Float[Tensor, "*b m"] | None = None
    max_logit: Float[Tensor, "*b m"] | None = None
    total_weight: Float[Tensor, "*b m"] | None = None


def sigmoid_attend(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*b n d"],
    value: Float[Tensor, "*b n v"],
    *,
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    offset: float | None = None,
    statistics: Literal["none", "scalar"] = "scalar",
) -> SigmoidAttended:
    """sigmoid(<q, k> scale + offset) v with the statistics of every row, in memory linear in the number of tokens.

    Masks and the alignment of queries with keys are those of `attend`. Twice differentiable. Under torch.compile and
    inside torch.func transforms all logits are computed at once.

    Args:
        attn_mask: bool (True = attend) or added to the logits; broadcasts against [*b, m, n].
        bias: added to the logits; may be combined with a bool mask.
        scale: 1 / sqrt(d) by default.
        offset: added to all logits; default: -log of the number of keys that the row sees, with which the weights of
            zero logits sum to less than 1. [ramapuram24] has the length of the sequence in every row.
        statistics: "none" computes the output only.

    Law: tests/laws/test_sigmoid_attention_takes_subsets.py.

    >>> import torch
    >>> q, k, v = torch.randn(3, 4, 10, 8, dtype=torch.float64)
    >>> a = sigmoid_attend(q, k, v, offset=-1.0)
    >>> torch.allclose(a.output, torch.sigmoid(q @ k.mT / 8**0.5 - 1) @ v)
    True
    """
    if statistics not in ("none", "scalar"):
        condition, remedy = 'statistics must be "none" or "scalar"', "Leave it out for scalar statistics."
        raise InputValueError("sigmoid_attend", "statistics", f"{condition}, got {statistics!r}", remedy)
    with autocast_disabled(query):
        parts = operands("sigmoid_attend", query, key, value)
        sight = masks.sight(attn_mask, bias, None, lead=parts.batch, size=parts.size, like=query)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        columns = _columns(parts, sight.mask, sight.bias, factor, offset, is_causal, statistics == "scalar")
        v = value.shape[-1]
        output, rows = columns[..., :v], columns[..., v:].unbind(-1)
        return SigmoidAttended(parts.restored(output).to(query.dtype), *(parts.restored(row) for row in rows))


def _columns(
    parts: Operands,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    offset: float | None,
    is_causal: bool,
    statistics: bool,
) -> Tensor:
    """Output and statistics of every row, side by side: [b, h, m, v] or [b, h, m, v + 6]."""
    h, m, n = parts.size

    def block(
        q: Tensor, at: Tensor, row_mask: Part, row_bias: Part, k: Tensor, v: Tensor, key_mask: Part, key_bias: Part
    ) -> Tensor:
        visible = key_mask if row_mask is None else row_mask.movedim(0, 2)
        added = key_bias if row_bias is None else row_bias.movedim(0, 2)
        if is_causal:
            before = torch.arange(n, device=at.device) <= at.unsqueeze(-1)
            visible = before if visible is None else visible & before
        if added is not None:
            visible = added != -torch.inf if visible is None else visible & (added != -torch.inf)
        shift = _shift(visible, n, q) if offset is None else offset
        end = _last_key(at, n) if is_causal else n
        s = q.movedim(0, 2) @ k[..., :end, :].mT + shift
        if added is not None:
            s = s + added[..., :end]
        hidden = None if visible is None else ~visible[..., :end]
        return _bits(s, hidden, v[..., :end, :], statistics=statistics).movedim(2, 0)

    at = torch.arange(n - m, n, device=parts.query.device)
    by_row = [None if t is None or t.shape[2] == 1 else t.movedim(2, 0) for t in (mask, bias)]
    shared = [t if t is not None and t.shape[2] == 1 else None for t in (mask, bias)]
    rows = ((scale * parts.query).movedim(2, 0), at, *by_row)
    width = parts.query.shape[0] * h * n
    return rowwise(block, rows, (parts.key, parts.value, *shared), width=width).movedim(0, 2)


def _shift(visible: Tensor | None, n: int, like: Tensor) -> Tensor | float:
    """-log of the number of visible keys, 0 where there are none."""
    if visible is None:
        return -math.log(max(n, 1))
    return -visible.sum(-1, keepdim=True).clamp(min=1).to(like.dtype).log()


def _last_key(at: Tensor, n: int) -> int:
    """Number of keys that any row of a block sees under a causal mask; all where positions should not be read."""
    if at.device.type != "cpu" or torch.compiler.is_compiling() or not len(at):
        return n
    return max(1, int(at[-1]) + 1)


def _bits(s: Tensor, hidden: Tensor | None, v: Tensor, *, statistics: bool) -> Tensor:
    """Sums over the keys that are not hidden."""
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    w = torch.sigmoid(s)
    output = w @ v
    if not statistics:
        return output
    finite = s if hidden is None else s.masked_fill(s == -torch.inf, 0.0)
    away = finite.abs()
    entropy = torch.log1p(torch.exp(-away)) + away * torch.sigmoid(-away)  # even in s: no cancellation
    if hidden is not None:
        entropy = entropy.masked_fill(s == -torch.inf, 0.0)
    weighted = w * finite
    variance = weighted * finite * torch.sigmoid(-finite)
    sums = [softplus(s, threshold=40.0), entropy, weighted, variance]
    largest = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    columns = [output, *(t.sum(-1, keepdim=True) for t in sums), largest, w.sum(-1, keepdim=True)]
    return torch.cat(columns, -1)
