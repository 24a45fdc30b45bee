"""Alerts of the monitor: their thresholds, and the history they are compared with.

Read next: monitor_rows.py (the statistics), monitoring.py (which raises the alerts).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .monitor_rows import SINK, Alert, Heads


class Thresholds(NamedTuple):
    """Thresholds of the alerts; None disables one.

    Attributes:
        entropy: "entropy collapse" when the mean entropy of a layer, over heads and rows, falls below this fraction of
            its maximum so far, which near the start of training is the entropy of uniform weights. [zhai23] describe
            the phenomenon without a threshold; the lowest layer of two pretrained models has 0.24 (SmolLM2) and 0.50
            (MiniLM) of the uniform entropy.
        logit: "logit explosion" when a logit exceeds this, the bound at which [kimi25] clip queries and keys in
            training.
        sink: "attention sink" when more than half of the heads of a layer have, on average, more than this weight on
            the first key, the bound of [gu25]. Of short sequences uniform weights u have that much; therefore the
            excess (weight - u) / (1 - u) is compared.
        nan: "NaN" when more heads of a layer than this have a statistic that is not a number.
    """

    entropy: float | None = 0.1
    logit: float | None = 100.0
    sink: float | None = SINK
    nan: float | None = 0.0


class AlertHistory:
    """Alerts of a training run, with the greatest entropy of each layer so far.

    `on_alert` gets each alert once for each kind and layer; by default each kind is one warning for all its layers.
    """

    def __init__(self, thresholds: Thresholds, on_alert: Callable[[Alert], None] | None) -> None:
        self._thresholds, self._on_alert = thresholds, on_alert
        self._highest: dict[str, float] = {}
        self._reported: set[tuple[str, str]] = set()

    def alerts(self, step: int, layers: Mapping[str, Heads]) -> tuple[Alert, ...]:
        """Alerts of a step; a layer without rows, as in a batch of padding, has none."""
        return tuple(
            alert for layer, heads in layers.items() if heads.rows for alert in self._of_layer(step, layer, heads)
        )

    def _of_layer(self, step: int, layer: str, heads: Heads) -> Iterator[Alert]:
        entropy, logit, sink, nan = self._thresholds
        if nan is not None and heads.nan_heads > nan:
            yield Alert("NaN", layer, float(heads.nan_heads), nan, step)
        mean, most = float(heads.entropy.mean.mean()), float(heads.max_logit.greatest.max())
        highest = self._highest[layer] = max(self._highest.get(layer, 0.0), mean)  # this order ignores NaN
        if entropy is not None and mean < entropy * highest:
            yield Alert("entropy collapse", layer, mean, entropy * highest, step)
        if logit is not None and most > logit:
            yield Alert("logit explosion", layer, most, logit, step)
        if sink is not None:
            threshold = heads.uniform_sink + sink * (1.0 - heads.uniform_sink)
            if float((heads.sink.mean > threshold).double().mean()) > 0.5:
                yield Alert("attention sink", layer, float(heads.sink.mean.median()), float(threshold.median()), step)

    def report(self, alerts: tuple[Alert, ...]) -> None:
        """Call `on_alert`, or warn, for alerts of a kind and layer that have not been reported before."""
        new = [alert for alert in alerts if (alert.kind, alert.layer) not in self._reported]
        self._reported |= {(alert.kind, alert.layer) for alert in new}
        if self._on_alert is not None:
            for alert in new:
                self._on_alert(alert)
            return
        kinds: dict[str, list[Alert]] = defaultdict(list)
        for alert in new:
            kinds[alert.kind].append(alert)
        for of_kind in kinds.values():
            warnings.warn(_message(of_kind), stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Greatest entropies and reported alerts."""
        return {"highest": dict(self._highest), "reported": sorted(map(list, self._reported))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._highest = dict(state["highest"])
        self._reported = {(kind, layer) for kind, layer in state["reported"]}


def _message(alerts: list[Alert]) -> str:
    """Warning about alerts of one kind: the first layers with their values."""
    first, *others = alerts
    listed = "; ".join(f"{alert.layer}: {alert.comparison()}" for alert in others[:3])
    rest = f" and {len(others) - 3} other layers" if len(others) > 3 else ""
    return str(first) + (f"; {listed}{rest}" if others else "")
