"""The rows of one call of attention: how many keys each sees, and some of them key by key.

    s_mn = u_mn + w_mn              u: scale <q_m, k_n>, soft-capped;  w: the log weight, bias or -inf where n is hidden

Statistics of every row come with the call. What needs all logits of a row is computed for one token of each 1 / SHARE
that follow each other in a sequence, and moments of queries and keys for one of each 1 / OF_MOMENTS. Which one of them
is said by a hash, so that a token is chosen with the same probability wherever it is, and is the same in every layer
and however the corpus is cut; sequences of one length have as many. What layers share is looked at once for a batch,
and predictions that want the same rows get the same ones.

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
    """How many keys the queries of a call see, and the masks and sizes that say so."""

    sight: Sight
    sizes: tuple[int | None, int | None, int, int]
    seen: Float[Tensor, "#b #h #m"]


@dataclass
class _Shared:
    """What the layers of a model share in one batch."""

    chosen: dict[tuple[int, int, int], tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]]] = field(default_factory=dict)
    counted: list[_Counted] = field(default_factory=list)


class Rows(NamedTuple):
    """The chosen rows of a call, in float32 at least; `valid` is false where a sequence has fewer of them than others.

    query: scaled, so that products are <query, key> before the soft cap.
    products, log_weights: their sum are the logits.
    """

    places: Int[Tensor, "b r"]
    valid: Bool[Tensor, "b r"]
    query: Float[Tensor, "b h r d"]
    key: Float[Tensor, "b hk n d"]
    products: Float[Tensor, "b h r n"]
    log_weights: Float[Tensor, "b #h r n"]

    @property
    def logits(self) -> Float[Tensor, "b h r n"]:
        """Those that enter the softmax; a sink is one more."""
        return self.products + self.log_weights

    @property
    def seen(self) -> Float[Tensor, "b #h r"]:
        """How many keys each row sees."""
        return (self.log_weights > -torch.inf).sum(-1).to(self.query.dtype)

    def of(self, statistic: Float[Tensor, "b h m"]) -> Float[Tensor, "b h r"]:
        """A statistic of all rows, of these."""
        return statistic.gather(2, self.places.unsqueeze(1).expand(-1, statistic.shape[1], -1))

    def products_with(
        self, key: Float[Tensor, "b hk n d"], query: Float[Tensor, "b h r d"] | None = None
    ) -> Float[Tensor, "b h r n"]:
        """<query, key> with other keys, or other queries, without a soft cap."""
        return logits(self.query if query is None else query, key, None, None, Scoring(1.0))

    def averaged(self, weights: Float[Tensor, "b h r n"], vectors: Float[Tensor, "b hk n v"]) -> Tensor:
        """sum_n weights_n vectors_n, [b, h, r, v], of vectors that groups of heads share."""
        b, h, r, _ = weights.shape
        return (grouped(weights, vectors.shape[1]) @ vectors).reshape(b, h, r, vectors.shape[-1])


def applies(event: Attended, batch_pass: BatchPass) -> bool:
    """Whether a call has queries and keys, and rows that are those of the batch."""
    has = isinstance(event.call, AttentionArguments)
    return has and event.query.ndim == 4 and len(event.query) == len(batch_pass.batch.keys)


def rows_of(event: Attended, batch_pass: BatchPass, *, part: float = 1.0) -> Rows | None:
    """The chosen rows of a call to which this `applies`, or a part of them; None of a call without queries."""
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
    """One token of each 1 / share that follow each other, and whether it is one: padding and the end are not.

    Computed where the batch is; nothing waits for a GPU, since as many are chosen whatever the hashes are.
    """
    known, batch = batch_pass.real(event), batch_pass.batch
    (b, m), every = known.shape, max(round(1 / share), 1)
    held = batch_pass.memory(_Shared).chosen
    if (b, m, every) not in held:
        first = torch.arange(0, m, every, device=known.device)
        starts = batch.starts.to(known.device, non_blocking=True).unsqueeze(-1)
        place = first + token_hashes(batch.keys.to(known.device), starts + first) % every
        valid = (place < m) & known.gather(1, place.clamp(max=m - 1))
        # What stands in for tokens that are none is one, so that it sees keys.
        held[b, m, every] = torch.where(valid, place, known.int().argmax(-1, keepdim=True)), valid
    return held[b, m, every]


def at(t: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"]) -> Float[Tensor, "b h r d"]:
    """Of every head the rows at these places of each sequence; rows that lie together in memory are read together."""
    b, h, m, d = t.shape
    first = torch.arange(b, device=t.device).unsqueeze(-1)
    beside = t.transpose(1, 2)
    if beside.is_contiguous():  # as models have it: all heads of a token side by side
        places = (first * m + index).flatten()
        return beside.reshape(b * m, h * d).index_select(0, places).reshape(b, -1, h, d).transpose(1, 2)
    head = torch.arange(h, device=t.device).reshape(1, h, 1)
    places = ((first.unsqueeze(-1) * h + head) * m + index.unsqueeze(1)).flatten()
    return t.reshape(b * h * m, d).index_select(0, places).reshape(b, h, -1, d)


def some(
    event: Attended, batch_pass: BatchPass, *tensors: Float[Tensor, "b _ n _"]
) -> tuple[Bool[Tensor, " t"], list[Float[Tensor, "_ t _"]]]:
    """Queries, or what else there is for each token of a call, of the tokens chosen for moments; and which count."""
    index, valid = chosen(event, batch_pass, OF_MOMENTS)
    return valid.flatten(), [at(t, index).transpose(0, 1).flatten(1, 2) for t in tensors]


def some_keys(event: Attended, batch_pass: BatchPass) -> tuple[Tensor, Tensor]:
    """Keys [hk, t, d] of the chosen tokens, all keys where they are of other tokens than the queries; which count."""
    call = event.arguments
    seen = event.visible_keys()
    seen = torch.ones_like(call.key[:, 0, :, 0], dtype=torch.bool) if seen is None else seen
    if event.crosses or call.key.shape[2] != call.query.shape[2]:
        return seen.flatten(), call.key.transpose(0, 1).flatten(1, 2)
    valid, (keys, shown) = some(event, batch_pass, call.key, seen[:, None, :, None].to(call.key.dtype))
    return valid & (shown.flatten() > 0), keys


def moments_of_queries(event: Attended, batch_pass: BatchPass) -> Comoments:
    """Of scaled queries, beside the attended means of keys where they are known, [h, d]: once for all predictions."""
    call, mean = event.arguments, event.attention.key_mean

    def compute() -> Comoments:
        tokens, taken = some(event, batch_pass, *(t for t in (call.query, mean) if t is not None))
        q = taken[0].to(event.attention.log_normalizer.dtype) * call.scale
        return comoments_of(q, *taken[1:], group=batch_pass.batch.group, weights=tokens, yy="trace")

    return batch_pass.once(call.query, "moments of queries", compute)


def moments_of_keys(event: Attended, batch_pass: BatchPass) -> Comoments:
    """Of keys, [hk, d]: once for all predictions."""

    def compute() -> Comoments:
        seen, k = some_keys(event, batch_pass)
        return comoments_of(k, group=batch_pass.batch.group, weights=seen)

    return batch_pass.once(event.query, "moments of keys", compute)


def log_weights_of(event: Attended, index: Int[Tensor, "b r"]) -> Tensor | None:
    """Bias and mask of some rows of a call [b, #h, r, n], bool if there is no bias; None if they see all keys alike."""
    call = event.arguments
    sight, scoring = _sight(call)
    if all(each is None for each in (*sight, scoring.left, scoring.right)):
        return None
    w = _log_weights(call, sight, scoring, index).expand(len(index), -1, -1, -1)
    return w > -torch.inf if sight.bias is None else w


def keys_seen(event: Attended, batch_pass: BatchPass) -> Float[Tensor, "#b #h #m"]:
    """How many keys every query sees."""
    call = event.call
    if not isinstance(call, AttentionArguments):
        return (call > HIDDEN).sum(-1).to(event.attention.log_normalizer.dtype)
    sight, scoring = _sight(call)
    sizes = (scoring.left, scoring.right, call.query.shape[2], call.key.shape[2])
    held = batch_pass.memory(_Shared).counted
    for known in held:
        # Layers share masks, each its own view of the same numbers.
        if known.sizes == sizes and all(_same(a, b) for a, b in zip(known.sight, sight, strict=True)):
            return known.seen
    w = _log_weights(call, sight, scoring, None)
    count = (w > -torch.inf).sum(-1).to(event.attention.log_normalizer.dtype)
    held.append(_Counted(sight, sizes, count))
    return count


def weight_of_first(event: Attended) -> Float[Tensor, "b h m"]:
    """The weight of every row on the first key of its sequence that is no padding: what a sink takes."""
    call, G = event.call, event.attention.log_normalizer
    seen = event.visible_keys()
    b = len(G)
    first = torch.zeros(b, dtype=torch.int64, device=G.device) if seen is None else seen.int().argmax(-1)
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
    """Masks and numbers of a call as the kernels take them."""
    b, h, m, _ = call.query.shape
    size = (h, m, call.key.shape[2])
    sight = masks.sight(call.attn_mask, call.bias, call.segments, lead=torch.Size((b,)), size=size, like=call.query)
    left, right = masks.band(bool(call.is_causal), call.window)
    return sight, Scoring(call.scale, call.softcap, left, right)


def _log_weights(
    call: AttentionArguments, sight: Sight, scoring: Scoring, rows: Tensor | None, key: Tensor | None = None
) -> Tensor:
    """[#b, #h, m, n], bias or 0, and -inf for hidden keys; of some rows [b, r]; of one key [b] of each sequence."""
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
        own = segments.gather(1, at.reshape(len(row), r).expand(b, -1))[:, None, :, None]
        other = segments.gather(1, col.reshape(len(col), -1).expand(b, -1))[:, None, None]
        hidden = hidden | (own != other)
    return torch.where(hidden, -torch.inf, 0.0 if sight.bias is None else cut(sight.bias))
