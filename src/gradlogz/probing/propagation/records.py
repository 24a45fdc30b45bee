"""Results of propagation as plain records.

    Propagation       observables between the layers of a model, for each series and seed
    LayerIteration    observables of tokens under one layer, repeated

    series      text        tokens of the text in the trained model
                sampled     sampled tokens in the trained model
                untrained   the same sampled tokens, random weights as before training
                redrawn     the same sampled tokens, random weights with the spectra of the trained matrices

Read next: run_propagation.py and layer_iteration.py (which make them), ../../reporting/propagation_page.py.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..._displays import shown
from ..._typing import Float, Tensor
from ...dynamics.intervals import band_of_mean

SERIES = ("text", "sampled", "untrained", "redrawn")


@dataclass(frozen=True)
class PropagationSettings:
    """Settings of a run.

    Attributes:
        model: name of the model.
        start: initial distribution (initial_tokens.py).
        tokens: number of tokens of one cloud.
        length: largest number of tokens of a window.
        seeds: number of clouds of each series.
        seed: seed of the first cloud.
        text: source of the text; empty for the default.
        layer: number of the layer that is repeated; None if all layers are passed once.
        steps: number of repetitions.
    """

    model: str
    start: str
    tokens: int
    length: int
    seeds: int
    seed: int
    text: str = ""
    layer: int | None = None
    steps: int = 0


class SeedMean(NamedTuple):
    """Mean over seeds with Student's 95 % confidence interval; NaN if there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Propagation:
    """Result of `propagate`.

    Attributes:
        settings: settings of the run.
        facts: facts about the model: architecture, layers, hidden_size, placement, ...
        observed: {series: {observable: [seeds, depths]}}; depth 0 is where the layers begin, and what belongs to a step
            is recorded after it.
        null: {observable: (low, middle, high)} for Gaussian tokens of equal number, 95 %.
    """

    settings: PropagationSettings
    facts: Mapping[str, Any]
    observed: Mapping[str, Mapping[str, Float[Tensor, "seeds depths"]]]
    null: Mapping[str, tuple[float, float, float]]

    @property
    def depths(self) -> int:
        """Number of recorded depths, one more than layers."""
        return next(iter(next(iter(self.observed.values())).values())).shape[-1]

    def estimate(self, series: str, name: str, depth: int = -1) -> SeedMean:
        """Return an observable of a series at a depth: mean over seeds and 95 % confidence interval."""
        return estimate(self.observed[series][name][:, depth])

    @property
    def command(self) -> str:
        """Command that reproduces the result."""
        return command_of(self.settings)

    def data(self) -> dict[str, Any]:
        """Return the result as plain data for JSON; NaN is None."""
        observed = _plain(self.observed)
        null = {name: dict(zip(("low", "middle", "high"), band, strict=True)) for name, band in self.null.items()}
        return {"settings": asdict(self.settings), "facts": dict(self.facts), "observed": observed, "null": null}

    def _repr_html_(self) -> str:
        """The page for a notebook, isolated from its styles."""
        return str(shown(self, "html"))


@dataclass(frozen=True)
class LayerIteration:
    """Result of `iterate_layer`: one layer, repeated on the text and on sampled tokens.

    Attributes:
        settings: settings of the run.
        facts: facts about the model, the name of the layer, and its difference from the simulator.
        times: numbers of repetitions at which observables were recorded.
        observed: {series: {observable: [seeds, times]}}, series "text" and "sampled".
    """

    settings: PropagationSettings
    facts: Mapping[str, Any]
    times: tuple[int, ...]
    observed: Mapping[str, Mapping[str, Float[Tensor, "seeds times"]]]

    def estimate(self, series: str, name: str, time: int = -1) -> SeedMean:
        """Return an observable of a series at a recorded time: mean over seeds and 95 % confidence interval."""
        return estimate(self.observed[series][name][:, time])

    @property
    def command(self) -> str:
        """Command that reproduces the result."""
        return command_of(self.settings)

    def data(self) -> dict[str, Any]:
        """Return the result as plain data for JSON; NaN is None."""
        observed = _plain(self.observed)
        times = list(self.times)
        return {"settings": asdict(self.settings), "facts": dict(self.facts), "times": times, "observed": observed}

    def _repr_html_(self) -> str:
        """The page for a notebook, isolated from its styles."""
        return str(shown(self, "html"))


def estimate(values: Float[Tensor, " seeds"]) -> SeedMean:
    """Return the mean over seeds with Student's 95 % confidence interval; NaN for the interval of one seed."""
    values = values.double()
    if len(values) < 2 or not bool(values.isfinite().all()):
        return SeedMean(float(values.mean()), math.nan, math.nan)
    band = band_of_mean(values, level=0.95)
    return SeedMean(float(values.mean()), float(band.low), float(band.high))


def command_of(settings: PropagationSettings) -> str:
    """Return the command that reproduces a result."""
    s = settings
    words = ["gradlogz simulate", f"--model {shlex.quote(s.model)}", f"--start {s.start}"]
    words += [f"--text {shlex.quote(s.text)}"] if s.text else []
    if s.layer is not None:
        words += [f"--layer {s.layer}", f"--steps {s.steps}"]
    return " ".join([*words, f"--tokens {s.tokens}", f"--length {s.length}", f"--seeds {s.seeds}", f"--seed {s.seed}"])


def _plain(observed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, list[list[float | None]]]]:
    """Observables of every series as nested lists; None for numbers that are not finite."""

    def rows(values: Tensor) -> list[list[float | None]]:
        return [[v if math.isfinite(v) else None for v in row] for row in values.tolist()]

    return {series: {name: rows(values) for name, values in columns.items()} for series, columns in observed.items()}
