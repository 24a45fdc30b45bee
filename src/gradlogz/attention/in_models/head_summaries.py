"""What one training step says of every head: mean and extremes of its statistics, and what is alarming about them.

    entropy           of the weights; near 0 a head takes one key for all, whatever it is asked         [zhai23]
    log_normalizer    G
    logit_variance    of the logits under the weights: the energy variance, d²G/dbeta² at beta = 1
    max_logit         grows without bound before training diverges                         [dehghani23] [wortsman24]
    sink              the weight on the first key                                             [xiao24] [gu25]

Sums, least and greatest of parts join to those of the whole, over passes, accumulated gradients and processes alike.

Read next: monitoring.py, which collects them.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..._typing import Float, Tensor
from .intercepted_calls import Call, Logits, padding, visible

STATISTICS = ("entropy", "log_normalizer", "logit_variance", "max_logit", "sink")


class Extremes(NamedTuple):
    """Mean, least and greatest of one statistic over the rows of each head, [h]."""

    mean: Float[Tensor, " h"]
    least: Float[Tensor, " h"]
    greatest: Float[Tensor, " h"]


class Heads(NamedTuple):
    """The statistics of the heads of one layer, and over how many rows of each they were taken."""

    entropy: Extremes
    log_normalizer: Extremes
    logit_variance: Extremes
    max_logit: Extremes
    sink: Extremes
    rows: int


class Alert(NamedTuple):
    """Something to look at: what, where, and by how much."""

    kind: str  # "entropy collapse", "logit explosion" or "attention sink"
    layer: str
    value: float
    threshold: float
    step: int

    def __str__(self) -> str:
        side = "below" if self.value < self.threshold else "above"
        return f"{self.kind} in {self.layer} at step {self.step}: {self.value:.3g}, {side} {self.threshold:.3g}"


class Thresholds(NamedTuple):
    """When to raise an alert; None never does.

    entropy: "entropy collapse" when the mean entropy of a layer, over heads and rows, is below this part of the
        greatest that this layer had so far, which near the beginning of training is that of uniform weights. The
        phenomenon is that of [zhai23], who give no number; the layers of two pretrained models have 0.24 (SmolLM2) and
        0.50 (MiniLM) of the uniform entropy at least.
    logit: "logit explosion" when a logit is above this, the bound at which [kimi25] clip queries and keys in training.
    sink: "attention sink" when more than half of the heads of a layer give, on average, more than this weight to the
        first key, the bound of [gu25].
    """

    entropy: float | None = 0.1
    logit: float | None = 100.0
    sink: float | None = 0.3


class MonitorRow(NamedTuple):
    """What one step says of every layer, in the order of computation."""

    step: int
    layers: dict[str, Heads]
    alerts: tuple[Alert, ...]

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary for each head, as tables and trackers of experiments take them."""
        found = []
        for layer, heads in self.layers.items():
            numbers = {
                f"{name}_{part}": values.tolist()
                for name, extremes in zip(STATISTICS, heads[:5], strict=True)
                for part, values in zip(Extremes._fields, extremes, strict=True)  # type: ignore[arg-type]
            }
            for head in range(len(heads.entropy.mean)):
                values = {name: of_heads[head] for name, of_heads in numbers.items()}
                found.append({"step": self.step, "layer": layer, "head": head, "rows": heads.rows, **values})
        return found

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
    """Count, sums, least and greatest of the statistics of the heads of one layer, so far."""

    def __init__(self, values: Tensor, kept: Tensor | None) -> None:
        """values [5, b, h, m], the statistics of every row; kept [b, h, m] leaves rows out."""
        rows = (1, 3)
        if kept is None:
            self.count = torch.full_like(values[0, 0, :, 0], values[0, :, 0].numel(), dtype=torch.float64)
            self.sum, self.least, self.greatest = values.sum(rows), values.amin(rows), values.amax(rows)
        else:
            self.count = kept.sum((0, 2), dtype=torch.float64)
            self.sum = values.masked_fill(~kept, 0.0).sum(rows)
            self.least = values.masked_fill(~kept, torch.inf).amin(rows)
            self.greatest = values.masked_fill(~kept, -torch.inf).amax(rows)
        self.sum = self.sum.double()

    def add(self, other: "HeadSums") -> None:
        """Join what another pass found."""
        self.count = self.count + other.count
        self.sum = self.sum + other.sum
        self.least = torch.minimum(self.least, other.least)
        self.greatest = torch.maximum(self.greatest, other.greatest)


def heads_of(found: dict[str, HeadSums]) -> dict[str, Heads]:
    """Means and extremes of every layer, brought to the CPU at once; a head without rows has NaN for them."""
    packed = [torch.cat((s.count.unsqueeze(0), s.sum, s.least.double(), s.greatest.double())) for s in found.values()]
    whole = torch.cat(packed, -1).cpu()
    layers = {}
    for name, part in zip(found, whole.split([len(s.count) for s in found.values()], -1), strict=True):
        count, (sums, least, greatest) = part[0], part[1:].chunk(3)
        empty = count == 0
        ends = (t.masked_fill(empty, torch.nan) for t in (sums / count.clamp(min=1.0), least, greatest))
        extremes = [Extremes(*each) for each in zip(*ends, strict=True)]
        layers[name] = Heads(*extremes, rows=int(count.max()))  # type: ignore[call-arg, arg-type, misc]
    return layers


def sums_of(call: Call | Logits, *, crosses: bool = False) -> HeadSums:
    """The statistics of every head in one call, computed beside the model from its queries and keys.

    With `crosses` the keys are other tokens than the queries, whose padding they do not show.
    """
    seen, pad = visible(call), None if crosses else padding(call)
    found, sink = call.weight_of(None if seen is None else seen.int().argmax(-1))
    G = _three(found.log_normalizer)
    fields = (found.entropy, found.log_normalizer, found.logit_variance, found.max_logit, sink)
    values = torch.stack([_three(t).to(G.dtype) for t in fields if t is not None])
    if pad is None and _all_see(call):
        return HeadSums(values, None)
    kept = G != -torch.inf
    return HeadSums(values, kept if pad is None else kept & ~pad.unsqueeze(1))


def _three(statistic: Tensor) -> Tensor:
    """[b, h, m] of a statistic of a call without a batch, without heads, or with several dimensions before them."""
    if statistic.ndim > 3:
        return statistic.flatten(0, -3)
    return statistic.reshape(*(1,) * (3 - statistic.ndim), *statistic.shape)


def _all_see(call: Call | Logits) -> bool:
    """Whether every row is sure to see a key, so that none needs to be left out."""
    if isinstance(call, Logits) or any(name in call.options for name in ("attn_mask", "bias", "segments", "window")):
        return False
    return not call.options.get("is_causal") or call.query.shape[-2] <= call.key.shape[-2]


def merged(found: dict[str, HeadSums], group: Any, device: torch.device) -> dict[str, HeadSums]:
    """The sums over all processes of a group, each of which must call this in the same step.

    Layers that only some of the processes met, as with layers dropped at random, are those of the processes that did.
    """
    shapes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(shapes, {name: len(s.count) for name, s in found.items()}, group=group)
    heads = {name: count for each in shapes for name, count in each.items()}
    if not heads:
        return found
    whole = {name: found[name] if name in found else _nothing(count, device) for name, count in heads.items()}
    sums = torch.cat([torch.cat((s.count.unsqueeze(0), s.sum)) for s in whole.values()], -1)
    ends = torch.cat([torch.cat((s.least, -s.greatest)).double() for s in whole.values()], -1)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
    sizes = list(heads.values())
    for s, total, end in zip(whole.values(), sums.split(sizes, -1), ends.split(sizes, -1), strict=True):
        s.count, s.sum = total[0], total[1:]
        s.least, s.greatest = end[:5], -end[5:]
    return whole


def _nothing(heads: int, device: torch.device) -> HeadSums:
    none = torch.zeros(5, 1, heads, 1, device=device)
    return HeadSums(none, torch.zeros(1, heads, 1, dtype=torch.bool, device=device))
