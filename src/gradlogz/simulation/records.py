"""Results of simulations as plain records.

    Simulation      trajectories and final states of the clouds of all seeds, and the prediction of the theory
    Curve           predicted values of an observable over time
    FinalQuantity   value, confidence interval, expected value and verdict
    Phases          a phase diagram: final states over a grid of parameters

Read next: run_simulation.py and parameter_sweep.py (which make them), final_quantities.py (values with confidence
intervals), ../reporting/simulation_page.py and ../reporting/phases_page.py (the pages).
"""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from .._displays import shown
from .._settings import flags
from .._typing import Float, Tensor
from ..dynamics.evolution import Trajectory
from ..dynamics.verdict import CloudVerdict
from .grid import Range, grid_text
from .presets import Preset, meets, preset_of
from .settings import CUSTOM, SimulationSettings

Verdict = Literal["supported", "refuted", "inconclusive", ""]


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`.

    Attributes:
        settings: parameters of the run.
        start: initial clouds, one for each seed.
        trajectory: final clouds and the recorded observables.
        frames: tokens of the first cloud at each recorded step.
        preset: the preset, if the settings are those of a preset.
    """

    settings: SimulationSettings
    start: Float[Tensor, "b n d"]
    trajectory: Trajectory
    frames: Float[Tensor, "t n d"]
    preset: Preset | None = None

    @cached_property
    def verdicts(self) -> list[CloudVerdict]:
        """Final state of each cloud, with its evidence."""
        return self.trajectory.verdicts

    @property
    def verdict(self) -> CloudVerdict:
        """Final state of the first cloud."""
        return self.verdicts[0]

    @cached_property
    def met(self) -> list[bool]:
        """For each cloud, whether it meets the prediction; empty without a prediction."""
        if self.preset is None or not self.preset.expects:
            return []
        expects, observed = self.preset.expects, self.trajectory.observed
        return [
            meets(expects, v.kind, v.evidence.get("clusters", 0.0), {
                **{name: float(x[-1, i]) for name, x in observed.items()},
                **{f"start {name}": float(x[0, i]) for name, x in observed.items()},
            })
            for i, v in enumerate(self.verdicts)
        ]  # fmt: skip

    @property
    def command(self) -> str:
        """Command that reproduces the page; for a custom cloud, the Python call."""
        if self.settings.initial == CUSTOM:
            defaults = replace(
                SimulationSettings(),
                initial=CUSTOM,
                **{n: getattr(self.settings, n) for n in ("tokens", "dim", "seeds")},
            )
            options = {n: v for n, v in asdict(self.settings).items() if v != getattr(defaults, n)}
            return f"gradlogz.simulate({', '.join(['cloud', *(f'{n}={v!r}' for n, v in options.items())])})"
        base = SimulationSettings() if self.preset is None else self.preset.settings
        name = [] if self.preset is None else [self.preset.name]
        return " ".join(["gradlogz simulate", *name, *flags(self.settings, base)])

    def _repr_html_(self) -> str:
        """The page for a notebook, isolated from its styles."""
        html: str = shown(self, "html")
        return html


class Curve(NamedTuple):
    """Predicted values at the recorded times.

    Attributes:
        values: one for each recorded time; NaN, or a shorter list, where the prediction ends.
        formula: key of the formula; its text is in reporting/simulation_wording.py.
        factor: growth factor per step, for modes.
        degree: degree of the mode, for harmonics.
    """

    values: list[float]
    formula: str
    factor: float = math.nan
    degree: int = 0


class FinalQuantity(NamedTuple):
    """A quantity of all seeds.

    Attributes:
        name: a final state, an observable ("start slope": at the start), or a theorem.
        kind: "state" (values are shares), "observable" (means over seeds) or "theorem" (numbers of violations).
        value: share, mean or number.
        low, high: 95 % confidence interval; NaN if there is none.
        total: number of seeds, or of intervals for a theorem.
        expected: range of predicted values, or None.
        reference: origin of `expected`: "theory", or "null" for a Gaussian cloud.
        verdict: comparison with theory; empty without a prediction.
    """

    name: str
    kind: Literal["state", "observable", "theorem"]
    value: float
    low: float
    high: float
    total: int
    expected: tuple[float, float] | None = None
    reference: Literal["theory", "null", ""] = ""
    verdict: Verdict = ""


class GridPoint(NamedTuple):
    """Final state of the clouds of one grid point.

    Attributes:
        kind: the most frequent final state of its seeds.
        share: fraction of the seeds with this final state.
        evidence: medians of the evidence over these seeds.
    """

    kind: str
    share: float
    evidence: dict[str, float]


@dataclass(frozen=True)
class Phases:
    """Result of `sweep`: a phase diagram.

    Attributes:
        settings: parameters outside the grid.
        ranges: the axes of the grid.
        points: final states of the completed grid points, by the indices of their values.
        preset: name of the preset, if one was used.
        failures: errors of the batches of grid points that could not be computed, by their ids.
        interrupted: whether Ctrl-C ended the sweep.
    """

    settings: SimulationSettings
    ranges: tuple[Range, ...]
    points: dict[tuple[int, ...], GridPoint]
    preset: str | None = None
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def grid(self) -> str:
        """Text form of the grid, as on the command line."""
        return grid_text(self.ranges)

    @property
    def command(self) -> str:
        """Command that reproduces the page."""
        name = [] if self.preset is None else [self.preset]
        words = flags(self.settings, base_of(self.preset))
        return " ".join(["gradlogz simulate", *name, f'--sweep "{self.grid}"', *words])

    @property
    def complete(self) -> bool:
        """True if every grid point was completed."""
        return len(self.points) == math.prod(len(r.values) for r in self.ranges)

    def _repr_html_(self) -> str:
        """The page for a notebook, isolated from its styles."""
        html: str = shown(self, "html")
        return html


def base_of(preset: str | None) -> SimulationSettings:
    """Settings outside the grid: those of the preset, or 200 tokens, 300 steps and one seed."""
    return SimulationSettings(tokens=200, steps=300, seeds=1) if preset is None else preset_of(preset).settings
