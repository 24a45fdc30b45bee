"""Sums of the statistics of every head over the rows of attention: they become the rows of the monitor.

Sums, minima and maxima merge exactly over passes, accumulated gradients and processes.

Read next: monitor_rows.py (the statistics), monitoring.py (which collects them).
"""

from typing import Any

import torch
import torch.distributed as dist

from ..._typing import Tensor
from ..result import Attention
from .hidden_keys import padded
from .intercepted_calls import Call, Logits
from .monitor_rows import Extremes, Heads


class HeadSums:
    """Running count, sums, minima and maxima of the statistics of the heads of one layer."""

    def __init__(self, values: Tensor, selected: Tensor | None) -> None:
        """Sum the statistics of every row, values [5, b, h, m], over the rows selected, [b, h, m]; None: all."""
        rows = (1, 3)
        if selected is None:
            self.count = torch.full_like(values[0, 0, :, 0], values[0, :, 0].numel(), dtype=torch.float64)
            self.sum, self.least, self.greatest = values.sum(rows), values.amin(rows), values.amax(rows)
        else:
            self.count = selected.sum((0, 2), dtype=torch.float64)
            self.sum = values.masked_fill(~selected, 0.0).sum(rows)
            self.least = values.masked_fill(~selected, torch.inf).amin(rows)
            self.greatest = values.masked_fill(~selected, -torch.inf).amax(rows)
        self.sum = self.sum.double()

    def add(self, other: "HeadSums") -> None:
        """Add the sums of another pass."""
        self.count = self.count + other.count
        self.sum = self.sum + other.sum
        self.least = torch.minimum(self.least, other.least)
        self.greatest = torch.maximum(self.greatest, other.greatest)


def heads_of(sums: dict[str, HeadSums]) -> dict[str, Heads]:
    """Means and extremes of every layer, copied to the CPU in one transfer; NaN for a head without rows."""
    packed = [torch.cat((s.count.unsqueeze(0), s.sum, s.least.double(), s.greatest.double())) for s in sums.values()]
    table = torch.cat(packed, -1).cpu()
    layers = {}
    for name, part in zip(sums, table.split([len(s.count) for s in sums.values()], -1), strict=True):
        count, (sums, least, greatest) = part[0], part[1:].chunk(3)
        empty = count == 0
        ends = (t.masked_fill(empty, torch.nan) for t in (sums / count.clamp(min=1.0), least, greatest))
        extremes = [Extremes(*each) for each in zip(*ends, strict=True)]
        layers[name] = Heads(*extremes, rows=int(count.max()))  # type: ignore[call-arg, arg-type, misc]
    return layers


def sums_of(call: Call | Logits, *, crosses: bool = False, result: Attention | None = None) -> HeadSums:
    """Statistics of every head in one call, from its result if that shows them, else from its queries and keys.

    With `crosses` the keys are other tokens than the queries, so that the mask does not identify padded queries. No
    loss depends on the rows of padding.
    """
    visible = call.visible()
    if result is None:
        result = call.statistics()
    G = _three_dimensional(result.log_normalizer)
    sink = call.weight_on_first_key(result.log_normalizer, visible)
    fields = (result.entropy, result.log_normalizer, result.logit_variance, result.max_logit, sink)
    values = torch.stack([_three_dimensional(t).to(G.dtype) for t in fields if t is not None])
    are_keys = not crosses and visible is not None and G.shape[-1] == visible.shape[-1]
    if not are_keys and _every_row_sees_a_key(call):
        return HeadSums(values, None)
    rows = G != -torch.inf
    return HeadSums(values, rows & ~padded(visible).unsqueeze(1) if are_keys and visible is not None else rows)


def _three_dimensional(statistic: Tensor) -> Tensor:
    """Reshape a statistic to [b, h, m]: batch and heads may be missing, or have several dimensions."""
    if statistic.ndim > 3:
        return statistic.flatten(0, -3)
    return statistic.reshape(*(1,) * (3 - statistic.ndim), *statistic.shape)


def _every_row_sees_a_key(call: Call | Logits) -> bool:
    """Return whether every row certainly sees a key."""
    if isinstance(call, Logits) or any(name in call.options for name in ("attn_mask", "bias", "segments", "window")):
        return False
    return not call.options.get("is_causal") or call.query.shape[-2] <= call.key.shape[-2]


def merged(layers: dict[str, HeadSums], group: Any, device: torch.device) -> dict[str, HeadSums]:
    """Sums over all processes of a group; each process must call this in the same step.

    A layer that ran only in some processes, as with layer dropout, has the sums of those.
    """
    shapes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(shapes, {name: len(s.count) for name, s in layers.items()}, group=group)
    heads = {name: count for each in shapes for name, count in each.items()}
    if not heads:
        return layers
    merged = {name: layers[name] if name in layers else _no_rows(count, device) for name, count in heads.items()}
    sums = torch.cat([torch.cat((s.count.unsqueeze(0), s.sum)) for s in merged.values()], -1)
    ends = torch.cat([torch.cat((s.least, -s.greatest)).double() for s in merged.values()], -1)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
    sizes = list(heads.values())
    for s, total, end in zip(merged.values(), sums.split(sizes, -1), ends.split(sizes, -1), strict=True):
        s.count, s.sum = total[0], total[1:]
        s.least, s.greatest = end[:5], -end[5:]
    return merged


def _no_rows(heads: int, device: torch.device) -> HeadSums:
    none = torch.zeros(5, 1, heads, 1, device=device)
    return HeadSums(none, torch.zeros(1, heads, 1, dtype=torch.bool, device=device))
