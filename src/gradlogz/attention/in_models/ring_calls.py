"""A call of `ring_attend` inside a model: its rows are those of the local queries, over the keys of all processes.

    first key      of the sequence or of the document of a row; another process may hold it, so that the keys pass once
                   more around the ring, in steps that are recorded

Read next: intercepted_calls.py (other calls), ../ring.py (the call itself).
"""

from typing import Any, NamedTuple

import torch
from torch import distributed

from ..._typing import Bool, Float, Int, Tensor
from .. import masks
from ..result import Attention, by_heads
from ..ring import around, ring_attend
from ..ring_parts import Layout
from .first_keys import SinkWeights, learned_weight
from .hidden_keys import KeyVisibility, visible_by_masks


class RingCall(NamedTuple):
    """Query, key and value of this process, and the options of `ring_attend`."""

    query: Float[Tensor, "*b m d"]
    key: Float[Tensor, "*b n d"]
    value: Float[Tensor, "*b n v"]
    options: dict[str, Any]
    requested: str

    def attend(self, statistics: str = "scalar") -> Attention:
        """Compute the call with these statistics or those that it requested, whichever are more."""
        most = max(statistics, self.requested, key=("none", "scalar", "moments").index)
        return ring_attend(self.query, self.key, self.value, statistics=most, **self.options)  # type: ignore[arg-type]

    def shows_its_statistics(self) -> bool:
        """Return whether the result of this call has what a monitor reads."""
        return self.requested != "none"

    def every_row_sees_a_key(self) -> bool:
        """Return whether every row certainly sees a key."""
        return not self.options.keys() & {"attn_mask", "segments", "window"}

    def statistics(self) -> Attention:
        """Statistics of every row, computed separately and without a gradient."""
        with torch.no_grad():
            return self.attend()

    def sight(self) -> None:
        """Return None: keys of other processes are found anew for every layer."""

    def visible_keys(self) -> KeyVisibility:
        """Local keys that a mask does not hide; the first key of a row may be another process's."""
        return KeyVisibility.of(visible_by_masks((self.options.get("attn_mask"),), self.query, self.key), None, None)

    def tables_by_a_kernel(self, _result: Attention) -> None:
        """Return None: other processes have keys of these rows."""

    def norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Norms of local queries [*b, m], keys and values [*b, n]."""
        q, k, v = (torch.linalg.vector_norm(t.detach(), dim=-1, dtype=dtype) for t in self[:3])
        return q, k, v

    def sink_weights(self, log_normalizer: Tensor, keys: KeyVisibility) -> SinkWeights:
        """Weights of every row on the first visible key of its sequence or document, and on the learned sink."""
        options, G = self.options, by_heads(log_normalizer.detach())
        first = self._first_keys(keys.visible)
        left, right = masks.band(bool(options.get("is_causal")), options.get("window"))
        begin = first.position if left is None else torch.maximum(first.position, first.at - left)
        end = first.last if right is None else torch.minimum(first.last, first.at + right)
        sees_first = (begin == first.position) & (end >= first.position)
        uniform = torch.where(sees_first, 1.0 / torch.minimum(end - begin + 1, first.visible).clamp(min=1), 0.0)

        q, k = _by_heads(self.query).to(G.dtype), first.key.to(G.dtype)
        scale, softcap = options.get("scale"), options.get("softcap")
        s = (q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1)
        s = s * (q.shape[-1] ** -0.5 if scale is None else float(scale))
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        visible_first = (sees_first & ~first.hidden).unsqueeze(1) & (G != -torch.inf)
        weight = torch.where(visible_first, (s - G).exp(), 0.0)
        return SinkWeights(weight, uniform.unsqueeze(1), by_heads(learned_weight(options.get("sinks"), log_normalizer)))

    def _first_keys(self, visible: Bool[Tensor, "b 1 n"] | None) -> "_FirstKeys":
        """Find the first key of each row among the keys of all processes."""
        k, group, segments = _by_heads(self.key), self.options.get("group"), self.options.get("segments")
        b, (m, n) = len(k), (self.query.shape[-2], self.key.shape[-2])
        segments = None if segments is None else segments.reshape(-1, n).expand(b, -1).long()
        mask = None if visible is None else visible.squeeze(1).expand(b, -1)
        ranks = distributed.get_world_size(group)
        layout = Layout(ranks, self.options.get("placement", "contiguous"), m, n, (None, None))
        at = layout.positions(distributed.get_rank(group)).to(k.device)
        of_rows = torch.zeros(b, m, dtype=torch.long, device=k.device) if segments is None else segments
        position, tokens, visible_keys = (torch.full_like(of_rows, start) for start in (ranks * n, 0, 0))
        key, hidden = k.new_zeros(*k.shape[:2], m, k.shape[-1]), torch.zeros_like(of_rows, dtype=torch.bool)
        for block in around(k, k[..., :1], mask, segments, layout, group):
            # Without segments the sequence is one document; hidden keys are in none.
            documents = block.segments
            if documents is None:
                documents = of_rows.new_zeros(b, n) if block.mask is None else block.mask.long() - 1
            ordered, order = documents.sort(stable=True)
            low, high = (torch.searchsorted(ordered, of_rows, right=right) for right in (False, True))
            index = order.gather(-1, low.clamp(max=n - 1))
            place = layout.positions(block.rank).to(k.device)[index]
            earlier = (high > low) & (place < position)
            position = torch.where(earlier, place, position)
            chosen = block.key.gather(2, index[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1]))
            key = torch.where(earlier[:, None, :, None], chosen, key)
            if block.mask is not None:
                hidden = torch.where(earlier, ~block.mask.gather(-1, index), hidden)
            tokens += high - low
            visible_keys += n if block.mask is None else block.mask.sum(-1, keepdim=True)
        last = torch.full_like(position, ranks * n - 1) if segments is None else position + tokens - 1
        return _FirstKeys(at, position, last, visible_keys, hidden, key)


class _FirstKeys(NamedTuple):
    """The first key of each row, and the tokens of its document."""

    at: Int[Tensor, " m"]  # position of the row in the whole sequence
    position: Int[Tensor, "b m"]  # of the key
    last: Int[Tensor, "b m"]  # position of the last token of the document
    visible: Int[Tensor, "b m"]  # number of keys of the sequence that the mask does not hide
    hidden: Bool[Tensor, "b m"]  # the mask hides the key
    key: Float[Tensor, "b hk m d"]


def _by_heads(t: Tensor) -> Float[Tensor, "b h n d"]:
    """Operand with one batch dimension and heads, in the precision in which attention is computed."""
    t = t.detach()
    if torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64:
        t = t.to(torch.get_autocast_dtype(t.device.type))
    return t.flatten(0, -4) if t.ndim > 4 else t.reshape(*(1,) * (4 - t.ndim), *t.shape)


def call_from_ring(
    query: Tensor, key: Tensor, value: Tensor, *, statistics: str = "scalar", **options: Any
) -> RingCall:
    """Convert a call of `ring_attend`."""
    return RingCall(query, key, value, {k: v for k, v in options.items() if v is not None}, statistics)
