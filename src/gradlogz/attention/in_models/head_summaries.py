"""Statistics of every head in one training step: mean, minimum and maximum over rows, and alerts.

    entropy           of the weights; near 0 a head attends to a single key, whatever the query         [zhai23]
    log_normalizer    G
    logit_variance    variance of the logits under the weights: d²G/dbeta² at beta = 1
    max_logit         grows without bound before training diverges                         [dehghani23] [wortsman24]
    sink              the weight on the first key                                             [xiao24] [gu25]

Sums, minima and maxima merge exactly over passes, accumulated gradients and processes.

Read next: monitoring.py, which collects them.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..._typing import Float, Tensor
from ..result import Attention
from .intercepted_calls import Call, Logits, padding, visible

STATISTICS = ("entropy", "log_normalizer", "logit_variance", "max_logit", "sink")


class Extremes(NamedTuple):
    """Mean, minimum and maximum of one statistic over the rows of each head, [h]."""

    mean: Float[Tensor, " h"]
    least: Float[Tensor, " h"]
    greatest: Float[Tensor, " h"]


class Heads(NamedTuple):
    """Statistics of the heads of one layer, and the number of rows of each head."""

    entropy: Extremes
    log_normalizer: Extremes
    logit_variance: Extremes
    max_logit: Extremes
    sink: Extremes
    rows: int


class Alert(NamedTuple):
    """A statistic beyond its threshold."""

    kind: str  # "entropy collapse", "logit explosion" or "attention sink"
    layer: str
    value: float
    threshold: float
    step: int

    def __str__(self) -> str:
        side = "below" if self.value < self.threshold else "above"
        return f"{self.kind} in {self.layer} at step {self.step}: {self.value:.3g}, {side} {self.threshold:.3g}"


class Thresholds(NamedTuple):
    """Thresholds of the alerts; None disables one.

    entropy: "entropy collapse" when the mean entropy of a layer, over heads and rows, falls below this fraction of its
        maximum so far, which near the start of training is the entropy of uniform weights. [zhai23] describe the
        phenomenon without a threshold; the lowest layer of two pretrained models has 0.24 (SmolLM2) and 0.50 (MiniLM)
        of the uniform entropy.
    logit: "logit explosion" when a logit exceeds this, the bound at which [kimi25] clip queries and keys in training.
    sink: "attention sink" when more than half of the heads of a layer have, on average, more than this weight on the
        first key, the bound of [gu25].
    """

    entropy: float | None = 0.1
    logit: float | None = 100.0
    sink: float | None = 0.3


class MonitorRow(NamedTuple):
    """Statistics of every layer in one step, in the order of computation, and the alerts."""

    step: int
    layers: dict[str, Heads]
    alerts: tuple[Alert, ...]

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary for each head, for tables and experiment trackers."""
        records = []
        for layer, heads in self.layers.items():
            numbers = {
                f"{name}_{part}": values.tolist()
                for name, extremes in zip(STATISTICS, heads[:5], strict=True)
                for part, values in zip(Extremes._fields, extremes, strict=True)  # type: ignore[arg-type]
            }
            for head in range(len(heads.entropy.mean)):
                values = {name: of_heads[head] for name, of_heads in numbers.items()}
                records.append({"step": self.step, "layer": layer, "head": head, "rows": heads.rows, **values})
        return records

    def __str__(self) -> str:
        width = max([16, *map(len, self.layers)])
        lines = [f"{f'step {self.step}':<{width}}  entropy   least   log Z   variance   max logit   sink"]
        for layer, h in self.layers.items():
            lines.append(
                f"{layer:<{width}}  {h.entropy.mean.mean():7.3f} {h.entropy.mean.min():7.3f} "
                f"{h.log_normalizer.mean.mean():7.2f} {h.logit_variance.mean.mean():10.3f} "
                f"{h.max_logit.greatest.max():11.2f} {h.sink.mean.mean():6.2f}"
            )
        return "\n".join([*lines, *map(str, self.alerts)])


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

    With `crosses` the keys are other tokens than the queries, so that the mask does not identify padded queries.
    """
    keys, pad = visible(call), None if crosses else padding(call)
    if result is None or isinstance(call, Logits):
        result, sink = call.statistics_and_weight(None if keys is None else keys.int().argmax(-1))
    else:
        sink = call.weight_on_first_key(result)
    G = _three_dimensional(result.log_normalizer)
    fields = (result.entropy, result.log_normalizer, result.logit_variance, result.max_logit, sink)
    values = torch.stack([_three_dimensional(t).to(G.dtype) for t in fields if t is not None])
    if pad is None and _every_row_sees_a_key(call):
        return HeadSums(values, None)
    rows = G != -torch.inf
    return HeadSums(values, rows if pad is None else rows & ~pad.unsqueeze(1))


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
