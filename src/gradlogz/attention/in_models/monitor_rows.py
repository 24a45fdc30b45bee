"""Rows of the monitor: statistics of every head in one training step, and the alerts.

    entropy           of the weights; near 0 a head attends to a single key, whatever the query         [zhai23]
    log_normalizer    G
    logit_variance    variance of the logits under the weights: d²G/dbeta² at beta = 1
    max_logit         grows without bound before training diverges                         [dehghani23] [wortsman24]
    sink              the weight on the first key                                             [xiao24] [gu25]

Read next: head_summaries.py (how they are computed), writers.py (where rows are written).
"""

from typing import Any, NamedTuple

from ..._typing import Float, Tensor

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

    def scalars(self) -> dict[str, float]:
        """Six numbers of each layer, by names such as "attention/blocks.0.attention/entropy".

        entropy, log_normalizer, logit_variance and sink are means over heads and rows, max_logit is the largest logit,
        and entropy_of_lowest_head is the mean over rows of the head in which it is least.
        """
        return {
            f"attention/{layer}/{name}": float(value)
            for layer, heads in self.layers.items()
            for name, value in {
                "entropy": heads.entropy.mean.mean(),
                "entropy_of_lowest_head": heads.entropy.mean.min(),
                "log_normalizer": heads.log_normalizer.mean.mean(),
                "logit_variance": heads.logit_variance.mean.mean(),
                "max_logit": heads.max_logit.greatest.max(),
                "sink": heads.sink.mean.mean(),
            }.items()
        }

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
