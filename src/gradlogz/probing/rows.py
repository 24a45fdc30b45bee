"""The rows of one call of attention: how many keys each sees, and some of them key by key.

    s_mn = u_mn + w_mn              u: scale <q_m, k_n>, soft-capped;  w: the log weight, bias or -inf where n is hidden

Statistics of every row come with the call. What needs all logits of a row is computed for the rows whose token has a
hash under SHARE of all hashes, and moments of queries and keys for those under OF_MOMENTS: the same tokens in every
layer, and however the corpus is cut. What layers share is looked at once: `memory` lasts for a batch.

Read next: predictions/identity.py, predictions/gaussian_measure.py and predictions/hopfield.py, which use them.
"""

from typing import Any, NamedTuple

import torch

from .._typing import Bool, Float, Int, Tensor
from ..attention import masks
from ..attention.calls import HIDDEN, Call, visible
from ..kernels.scoring import Scoring, Sight, grouped, logits
from .capturing import Attended
from .prediction import real
from .statistics import token_hashes
from .texts import Batch

SHARE, OF_MOMENTS = 1 / 32, 1 / 4
_GREATEST = 2**63 - 1


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


def applies(event: Attended, batch: Batch) -> bool:
    """Whether a call has queries and keys, and rows that are those of the batch."""
    return isinstance(event.call, Call) and event.query.ndim == 4 and len(event.query) == len(batch.keys)


def rows_of(event: Attended, batch: Batch, memory: dict[str, Any], *, part: float = 1.0) -> Rows | None:
    """The chosen rows of a call to which this `applies`, or a part of them; None if no token of the batch is chosen."""
    index, valid = _chosen(event, batch, memory, part * SHARE)
    if index.shape[1] == 0:
        return None
    call = event._call()
    sight, scoring = _sight(call)
    wide = event.attention.log_normalizer.dtype
    b, h, _, d = call.query.shape
    q = call.query.gather(2, index[:, None, :, None].expand(b, h, -1, d)).to(wide)
    k = call.key.to(wide)
    w = _log_weights(call, sight, scoring, index)
    return Rows(index, valid, q * scoring.scale, k, logits(q, k, None, None, scoring), w.to(wide).expand(b, -1, -1, -1))


def some(
    event: Attended, batch: Batch, memory: dict[str, Any], *tensors: Float[Tensor, "b _ n _"]
) -> tuple[Bool[Tensor, " t"], list[Float[Tensor, "_ t _"]]]:
    """Queries, or what else there is for each token of a call, of the tokens chosen for moments; and which count."""
    index, valid = _chosen(event, batch, memory, OF_MOMENTS)
    at = index[:, None, :, None]
    taken = [t.gather(2, at.expand(-1, t.shape[1], -1, t.shape[3])).transpose(0, 1).flatten(1, 2) for t in tensors]
    return valid.flatten(), taken


def some_keys(event: Attended, batch: Batch, memory: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys [hk, t, d] of the chosen tokens, all keys where they are of other tokens than the queries; which count."""
    call = event._call()
    seen = visible(call)
    seen = torch.ones_like(call.key[:, 0, :, 0], dtype=torch.bool) if seen is None else seen
    if event.crosses or call.key.shape[2] != call.query.shape[2]:
        return seen.flatten(), call.key.transpose(0, 1).flatten(1, 2)
    valid, (keys, shown) = some(event, batch, memory, call.key, seen[:, None, :, None].to(call.key.dtype))
    return valid & (shown.flatten() > 0), keys


def keys_seen(event: Attended, memory: dict[str, Any]) -> Float[Tensor, "#b #h #m"]:
    """How many keys every query sees."""
    call = event.call
    if not isinstance(call, Call):
        return (call.logits > HIDDEN).sum(-1).to(event.attention.log_normalizer.dtype)
    sight, scoring = _sight(call)
    about = (scoring.left, scoring.right, call.query.shape[2], call.key.shape[2])
    held: list[Any] = memory.setdefault("keys seen", [])
    for one, other, count in held:
        # Layers share masks, each its own view of the same numbers.
        if other == about and all(_same(a, b) for a, b in zip(one, sight, strict=True)):
            return count
    w = _log_weights(call, sight, scoring, None)
    count = (w > -torch.inf).sum(-1).to(event.attention.log_normalizer.dtype)
    held.append((sight, about, count))
    return count


def weight_of_first(event: Attended) -> Float[Tensor, "b h m"]:
    """The weight of every row on the first key of its sequence that is no padding: what a sink takes."""
    call, G = event.call, event.attention.log_normalizer
    seen = visible(call)
    b = len(G)
    first = torch.zeros(b, dtype=torch.int64, device=G.device) if seen is None else seen.int().argmax(-1)
    at = first[:, None, None, None]
    if isinstance(call, Call):
        sight, scoring = _sight(call)
        key = call.key.gather(2, at.expand(b, call.key.shape[1], 1, call.key.shape[3])).to(G.dtype)
        s = logits(call.query.to(G.dtype), key, None, None, scoring)
        s = s + _log_weights(call, sight, scoring, None, first)
    else:
        s = call.logits.gather(-1, at.expand(*call.logits.shape[:3], 1))
    return torch.where(event.attention.seen, (s.squeeze(-1).to(G.dtype) - G).exp(), 0.0)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _chosen(event: Attended, batch: Batch, memory: dict[str, Any], share: float) -> tuple[Tensor, Tensor]:
    """The tokens with small hashes, [b, r], and whether each is one: found once for a batch, on the CPU."""
    m = event.query.shape[2]
    held: dict[tuple[int, float], tuple[Tensor, Tensor]] = memory.setdefault("chosen", {})
    if (m, share) not in held:
        valid = real(batch, event)
        positions = batch.starts.cpu().unsqueeze(-1) + torch.arange(m)
        small = (token_hashes(batch.keys.cpu(), positions) <= min(int(share * _GREATEST), _GREATEST)) & valid.cpu()
        index = small.int().argsort(dim=-1, descending=True, stable=True)[:, : int(small.sum(-1).max())]
        held[m, share] = index.to(valid.device), small.gather(1, index).to(valid.device)
    return held[m, share]


def _sight(call: Call) -> tuple[Sight, Scoring]:
    """Masks and numbers of a call as the kernels take them."""
    b, h, m, d = call.query.shape
    given = [call.options.get(name) for name in ("attn_mask", "bias", "segments")]
    sight = masks.sight(*given, lead=torch.Size((b,)), size=(h, m, call.key.shape[2]), like=call.query)  # type: ignore[arg-type]
    left, right = masks.band(bool(call.options.get("is_causal")), call.options.get("window"))
    scale = call.options.get("scale")
    return sight, Scoring(d**-0.5 if scale is None else float(scale), call.options.get("softcap"), left, right)


def _log_weights(call: Call, sight: Sight, scoring: Scoring, rows: Tensor | None, key: Tensor | None = None) -> Tensor:
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
