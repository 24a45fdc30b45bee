"""Rows of the monitor: statistics of every head in one training step, and the alerts.

    entropy           of the weights; near 0 a head attends to a single key, whatever the query         [zhai23]
    log_normalizer    G
    logit_variance    variance of the logits under the weights: d²G/dbeta² at beta = 1
    max_logit         grows without bound before training diverges                         [dehghani23] [wortsman24]
    sink              the weight on the first key of the sequence, or of the packed document  [xiao24] [gu25]
    learned_sink      the weight on the learned logit of a head, 0 without one
    norms             of queries, keys and values

Read next: head_summaries.py (how they are computed), writers.py (where rows are written).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._typing import Float, Tensor

# Statistics of a head that are written for each head.
STATISTICS = (
    "entropy",
    "log_normalizer",
    "logit_variance",
    "max_logit",
    "sink",
    "learned_sink",
    "query_norm",
    "key_norm",
    "value_norm",
)


# A head whose mean weight on the first key exceeds this is a sink head.   [gu25]
SINK = 0.3


class Extremes(NamedTuple):
    """Mean, minimum, maximum and standard deviation of one statistic over the rows of each head, [h]."""

    mean: Float[Tensor, " h"]
    least: Float[Tensor, " h"]
    greatest: Float[Tensor, " h"]
    deviation: Float[Tensor, " h"]


class Heads(NamedTuple):
    """Statistics of the heads of one layer.

    Attributes:
        key_norm: one for each key head, as value_norm. The norms are None for a layer that calls softmax itself.
        uniform_sink: the weight on the first key if every row had equal weights on the keys that it sees, [h].
        rows: number of rows of each head.
        nan_heads: number of heads with a statistic that is not a number; heads without rows do not count.
        kind: "full", "sliding", "MLA" (latent) or "cross".
    """

    entropy: Extremes
    log_normalizer: Extremes
    logit_variance: Extremes
    max_logit: Extremes
    sink: Extremes
    learned_sink: Extremes
    query_norm: Extremes | None
    key_norm: Extremes | None
    value_norm: Extremes | None
    uniform_sink: Float[Tensor, " h"]
    rows: int
    nan_heads: int
    kind: str

    def scalars(self) -> dict[str, float]:
        """Numbers of the layer: means over heads and rows unless the name says otherwise."""
        numbers = {
            "entropy": self.entropy.mean.mean(),
            "entropy_of_lowest_head": self.entropy.mean.min(),
            "log_normalizer": self.log_normalizer.mean.mean(),
            "log_normalizer_deviation": self.log_normalizer.deviation.mean(),
            "logit_variance": self.logit_variance.mean.mean(),
            "max_logit": self.max_logit.greatest.max(),
            "sink": self.sink.mean.mean(),
            "sink_of_strongest_head": self.sink.mean.max(),
            "share_of_sink_heads": (self.sink.mean > SINK).double().mean(),
        }
        if float(self.learned_sink.greatest.max()) > 0.0:
            numbers["learned_sink"] = self.learned_sink.mean.mean()
        for name in ("query_norm", "key_norm", "value_norm"):
            if (norm := getattr(self, name)) is not None:
                numbers[name] = norm.mean.mean()
        return {name: float(number) for name, number in numbers.items()}

    def records(self) -> Iterator[dict[str, float]]:
        """Numbers of each head."""
        for head in range(len(self.entropy.mean)):
            record: dict[str, float] = {}
            for name in STATISTICS:
                extremes = getattr(self, name)
                if extremes is not None:  # key heads are shared by groups of heads
                    index = head * len(extremes.mean) // len(self.entropy.mean)
                    record |= {f"{name}_{part}": float(t[index]) for part, t in extremes._asdict().items()}
            yield record


class Alert(NamedTuple):
    """A statistic beyond its threshold."""

    kind: str  # "NaN", "entropy collapse", "logit explosion" or "attention sink"
    layer: str
    value: float
    threshold: float
    step: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.layer} at step {self.step}: {self.comparison()}"

    def comparison(self) -> str:
        """The value and its threshold."""
        if self.kind == "NaN":
            return f"{self.value:.0f} heads"
        return f"{self.value:.3g}, {'below' if self.value < self.threshold else 'above'} {self.threshold:.3g}"


class MonitorRow(NamedTuple):
    """Statistics of every layer in one step, in the order of computation, and the alerts.

    `without_softmax` names the attention layers that made no call of softmax attention: those of linear and sigmoid
    attention, and with strict=False also others, which are an error otherwise.
    """

    step: int
    layers: dict[str, Heads]
    alerts: tuple[Alert, ...]
    without_softmax: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary for each head, for tables and experiment trackers."""
        return [
            {"step": self.step, "layer": layer, "kind": heads.kind, "head": head, "rows": heads.rows, **record}
            for layer, heads in self.layers.items()
            for head, record in enumerate(heads.records())
        ]

    def scalars(self) -> dict[str, float]:
        """Numbers of each layer, by names such as "attention/blocks.0.attention/entropy".

        entropy, log_normalizer, logit_variance, sink, learned_sink (in layers that have one) and query_norm, key_norm,
        value_norm are means over heads and rows. max_logit is the largest logit, log_normalizer_deviation the standard
        deviation over rows, entropy_of_lowest_head and sink_of_strongest_head are means over the rows of one head, and
        share_of_sink_heads is the share of heads with a mean sink above 0.3.
        """
        return {
            f"attention/{layer}/{name}": number
            for layer, heads in self.layers.items()
            for name, number in heads.scalars().items()
        }

    def __str__(self) -> str:
        """One line for each layer; docs/models.md explains the columns."""
        width = max([16, *map(len, self.layers)])
        columns = ("entropy", "lowest", "log Z", "variance", "max logit", "sink")
        lines = [f"{f'step {self.step}':<{width}}" + "".join(f"{column:>11}" for column in columns)]
        for layer, heads in self.layers.items():
            s = heads.scalars()
            names = ("entropy", "entropy_of_lowest_head", "log_normalizer", "logit_variance", "max_logit", "sink")
            lines.append(f"{layer:<{width}}" + "".join(f"{s[name]:>11.4g}" for name in names))
        return "\n".join([*lines, *map(str, self.alerts)])
