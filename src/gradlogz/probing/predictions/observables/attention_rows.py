"""Attention rows of one call: numbers of visible keys, and logits of a random sample of rows.

    s_mn = u_mn + w_mn              u: scale <q_m, k_n>, soft-capped;  w: log weight, bias, or -inf if key n is masked

Summary statistics of all rows come with the call. Statistics that need all logits of a row use one token in each window
of 1 / SHARE consecutive tokens, moments of queries and keys one in each window of 1 / OF_MOMENTS. A hash of the token
chooses it, so that every token has the same probability, and the choice is the same in every layer and does not depend
on batches; sequences of equal length have equally many. Masks that layers share are evaluated once for a batch, and all
predictions use the same rows.

Read next: ../identity.py, ../gaussian_measure.py and ../hopfield.py, which use them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Int, Tensor
from ....attention import masks
from ....attention.in_models.hidden_keys import HIDDEN
from ....kernels.attention.scoring import Scoring, Sight, grouped, logits
from ...batch_pass import BatchPass
from ...inside.events import Attended, AttentionArguments, Normed, Passed
from ...statistics import Comoments, comoments_of, token_hashes

SHARE, OF_MOMENTS = 1 / 32, 1 / 4


class _Counted(NamedTuple):
    """Numbers of visible keys of a call, with the masks and sizes that determine them."""

    sight: Sight
    sizes: tuple[int | None, int | None, int, int]
    visible: Float[Tensor, "#b #h #m"]


@dataclass
class _Shared:
    """Cache of samples and masks that layers share within a batch."""

    chosen: dict[tuple[int, int, int], tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]]] = field(default_factory=dict)
    counted: list[_Counted] = field(default_factory=list)


class Rows(NamedTuple):
    """Sampled rows of a call, in float32 or float64; `valid` is false for padding of shorter sequences.

    query: scaled queries, so that products are <query, key> before the soft cap.
    products, log_weights: the logits are their sum.
    """

    places: Int[Tensor, "b r"]
    valid: Bool[Tensor, "b r"]
    query: Float[Tensor, "b h r d"]
    key: Float[Tensor, "b hk n d"]
    products: Float[Tensor, "b h r n"]
    log_weights: Float[Tensor, "b #h r n"]

    @property
    def logits(self) -> Float[Tensor, "b h r n"]:
        """Logits of the softmax, without the sink."""
        return self.products + self.log_weights

    @property
    def visible(self) -> Float[Tensor, "b #h r"]:
        """Number of visible keys of each row."""
        return (self.log_weights > -torch.inf).sum(-1).to(self.query.dtype)

    def of(self, statistic: Float[Tensor, "b h m"]) -> Float[Tensor, "b h r"]:
        """Values of a statistic of all rows at the sampled rows."""
        return statistic.gather(2, self.places.unsqueeze(1).expand(-1, statistic.shape[1], -1))

    def products_with(
        self, key: Float[Tensor, "b hk n d"], query: Float[Tensor, "b h r d"] | None = None
    ) -> Float[Tensor, "b h r n"]:
        """<query, key> with other keys or other queries, without a soft cap."""
        return logits(self.query if query is None else query, key, None, None, Scoring(1.0))

    def averaged(self, weights: Float[Tensor, "b h r n"], vectors: Float[Tensor, "b hk n v"]) -> Tensor:
        """sum_n weights_n vectors_n, [b, h, r, v], of vectors that groups of heads share."""
        b, h, r, _ = weights.shape
        return (grouped(weights, vectors.shape[1]) @ vectors).reshape(b, h, r, vectors.shape[-1])


def applies(event: Attended, batch_pass: BatchPass) -> bool:
    """True if a call has queries and keys, and its rows are those of the batch."""
    has = isinstance(event.call, AttentionArguments)
    return has and event.query.ndim == 4 and len(event.query) == len(batch_pass.batch.keys)


def rows_of(event: Attended, batch_pass: BatchPass, *, part: float = 1.0) -> Rows | None:
    """Sampled rows of a call that satisfies `applies`, or a share `part` of them; None without rows."""
    call, share = event.arguments, part * SHARE

    def compute() -> Rows:
        index, valid = chosen(event, batch_pass, share)
        sight, scoring = _sight(call)
        wide = event.attention.log_normalizer.dtype
        q = at(call.query, index).to(wide)
        k = call.key.to(wide)
        w = _log_weights(call, sight, scoring, index).to(wide).expand(len(q), -1, -1, -1)
        return Rows(index, valid, q * scoring.scale, k, logits(q, k, None, None, scoring), w)

    rows = batch_pass.once(call.query, ("rows", share), compute)
    return rows if rows.places.shape[1] else None


def chosen(
    event: Attended | Passed | Normed, batch_pass: BatchPass, share: float
) -> tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]]:
    """Position of one token in each window of 1 / share consecutive tokens, and its validity (no padding).

    Computed on the device of the batch without synchronisation: the number of positions does not depend on hashes.
    """
    known, batch = batch_pass.real(event), batch_pass.batch
    (b, m), every = known.shape, max(round(1 / share), 1)
    held = batch_pass.memory(_Shared).chosen
    if (b, m, every) not in held:
        first = torch.arange(0, m, every, device=known.device)
        starts = batch.starts.to(known.device, non_blocking=True).unsqueeze(-1)
        place = first + token_hashes(batch.keys.to(known.device), starts + first) % every
        valid = (place < m) & known.gather(1, place.clamp(max=m - 1))
        # Invalid positions are replaced by a real token, so that its row has visible keys.
        held[b, m, every] = torch.where(valid, place, known.int().argmax(-1, keepdim=True)), valid
    return held[b, m, every]


def at(t: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"]) -> Float[Tensor, "b h r d"]:
    """Rows of every head at these positions, [b, h, r, d]; contiguous rows are read together."""
    b, h, m, d = t.shape
    first = torch.arange(b, device=t.device).unsqueeze(-1)
    beside = t.transpose(1, 2)
    if beside.is_contiguous():  # the layout of most models: all heads of a token together
        places = (first * m + index).flatten()
        return beside.reshape(b * m, h * d).index_select(0, places).reshape(b, -1, h, d).transpose(1, 2)
    head = torch.arange(h, device=t.device).reshape(1, h, 1)
    places = ((first.unsqueeze(-1) * h + head) * m + index.unsqueeze(1)).flatten()
    return t.reshape(b * h * m, d).index_select(0, places).reshape(b, h, -1, d)


def some(
    event: Attended, batch_pass: BatchPass, *tensors: Float[Tensor, "b _ n _"]
) -> tuple[Bool[Tensor, " t"], list[Float[Tensor, "_ t _"]]]:
    """Validity and values, [h, t, d], of tensors of a call at the tokens that are sampled for moments."""
    index, valid = chosen(event, batch_pass, OF_MOMENTS)
    return valid.flatten(), [at(t, index).transpose(0, 1).flatten(1, 2) for t in tensors]


def some_keys(event: Attended, batch_pass: BatchPass) -> tuple[Tensor, Tensor]:
    """Validity and keys, [hk, t, d], of the sampled tokens; of all keys in cross-attention."""
    call = event.arguments
    visible = event.visible_keys()
    visible = torch.ones_like(call.key[:, 0, :, 0], dtype=torch.bool) if visible is None else visible
    if event.crosses or call.key.shape[2] != call.query.shape[2]:
        return visible.flatten(), call.key.transpose(0, 1).flatten(1, 2)
    valid, (keys, shown) = some(event, batch_pass, call.key, visible[:, None, :, None].to(call.key.dtype))
    return valid & (shown.flatten() > 0), keys


def moments_of_queries(event: Attended, batch_pass: BatchPass) -> Comoments:
    """Moments of scaled queries, with attended means of keys if known; cached for all predictions."""
    call, mean = event.arguments, event.attention.key_mean

    def compute() -> Comoments:
        tokens, taken = some(event, batch_pass, *(t for t in (call.query, mean) if t is not None))
        q = taken[0].to(event.attention.log_normalizer.dtype) * call.scale
        return comoments_of(q, *taken[1:], group=batch_pass.batch.group, weights=tokens)

    return batch_pass.once(call.query, "moments of queries", compute)


def moments_of_keys(event: Attended, batch_pass: BatchPass) -> Comoments:
    """Moments of keys, [hk, d]; cached for all predictions."""

    def compute() -> Comoments:
        visible, k = some_keys(event, batch_pass)
        return comoments_of(k, group=batch_pass.batch.group, weights=visible)

    return batch_pass.once(event.query, "moments of keys", compute)


def log_weights_of(event: Attended, index: Int[Tensor, "b r"]) -> Tensor | None:
    """Bias and mask at some rows of a call, [b, #h, r, n], boolean without a bias; None without bias and mask."""
    call = event.arguments
    sight, scoring = _sight(call)
    if all(each is None for each in (*sight, scoring.left, scoring.right)):
        return None
    w = _log_weights(call, sight, scoring, index).expand(len(index), -1, -1, -1)
    return w > -torch.inf if sight.bias is None else w


def keys_seen(event: Attended, batch_pass: BatchPass) -> Float[Tensor, "#b #h #m"]:
    """Number of visible keys of every query."""
    call = event.call
    if not isinstance(call, AttentionArguments):
        return (call > HIDDEN).sum(-1).to(event.attention.log_normalizer.dtype)
    sight, scoring = _sight(call)
    sizes = (scoring.left, scoring.right, call.query.shape[2], call.key.shape[2])
    held = batch_pass.memory(_Shared).counted
    for known in held:
        # Layers share masks, each through its own view of the same memory.
        if known.sizes == sizes and all(_same(a, b) for a, b in zip(known.sight, sight, strict=True)):
            return known.visible
    w = _log_weights(call, sight, scoring, None)
    count = (w > -torch.inf).sum(-1).to(event.attention.log_normalizer.dtype)
    held.append(_Counted(sight, sizes, count))
    return count


def log_weights_of_call(call: AttentionArguments) -> tuple[Float[Tensor, "#b #h m n"], bool]:
    """Bias or 0, and -inf for masked keys, of all rows of a call; whether there is a bias."""
    sight, scoring = _sight(call)
    return _log_weights(call, sight, scoring, None), sight.bias is not None


def weight_of_first(event: Attended) -> Float[Tensor, "b h m"]:
    """Attention weight of every row on the first key that is no padding, the usual attention sink."""
    call, G = event.call, event.attention.log_normalizer
    visible = event.visible_keys()
    b = len(G)
    first = torch.zeros(b, dtype=torch.int64, device=G.device) if visible is None else visible.int().argmax(-1)
    at = first[:, None, None, None]
    if isinstance(call, AttentionArguments):
        sight, scoring = _sight(call)
        key = call.key.gather(2, at.expand(b, call.key.shape[1], 1, call.key.shape[3])).to(G.dtype)
        s = logits(call.query.to(G.dtype), key, None, None, scoring)
        s = s + _log_weights(call, sight, scoring, None, first)
    else:
        s = call.gather(-1, at.expand(*call.shape[:3], 1))
    return torch.where(event.attention.seen, (s.squeeze(-1).to(G.dtype) - G).exp(), 0.0)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _sight(call: AttentionArguments) -> tuple[Sight, Scoring]:
    """Masks and scoring parameters of a call, in the form of the kernels."""
    b, h, m, _ = call.query.shape
    size = (h, m, call.key.shape[2])
    sight = masks.sight(call.attn_mask, call.bias, call.segments, lead=torch.Size((b,)), size=size, like=call.query)
    left, right = masks.band(bool(call.is_causal), call.window)
    return sight, Scoring(call.scale, call.softcap, left, right)


def _log_weights(
    call: AttentionArguments, sight: Sight, scoring: Scoring, rows: Tensor | None, key: Tensor | None = None
) -> Tensor:
    """Bias or 0, and -inf for masked keys, [#b, #h, m, n]; at some rows [b, r], or at one key [b] per sequence."""
    m, n, device = call.query.shape[2], call.key.shape[2], call.query.device
    row = (torch.arange(m, device=device).unsqueeze(0) if rows is None else rows)[:, None, :, None]
    col = torch.arange(n, device=device).reshape(1, 1, 1, n) if key is None else key[:, None, None, None]

    def cut(t: Tensor) -> Tensor:
        if rows is not None and t.shape[2] > 1:
            t = t.expand(len(rows), -1, -1, -1).gather(2, row.expand(-1, t.shape[1], -1, n))
        return t if key is None else t.expand(len(key), -1, -1, -1).gather(3, col.expand(-1, *t.shape[1:3], 1))

    at = row + (n - m)  # queries are the last of the keys
    hidden = torch.zeros(len(row), 1, row.shape[2], col.shape[3], dtype=torch.bool, device=device)
    if scoring.left is not None:
        hidden = hidden | (col < at - scoring.left)
    if scoring.right is not None:
        hidden = hidden | (col > at + scoring.right)
    if sight.mask is not None:
        hidden = hidden | ~cut(sight.mask)
    if sight.segments is not None:
        b, r = max(len(sight.segments), len(row)), row.shape[2]
        segments = sight.segments.expand(b, -1)
        query_segment = segments.gather(1, at.reshape(len(row), r).expand(b, -1))[:, None, :, None]
        key_segment = segments.gather(1, col.reshape(len(col), -1).expand(b, -1))[:, None, None]
        hidden = hidden | (query_segment != key_segment)
    return torch.where(hidden, -torch.inf, 0.0 if sight.bias is None else cut(sight.bias))
