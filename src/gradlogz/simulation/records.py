"""Results of simulations as plain records.

    Simulation    clouds of all seeds over time, their verdicts, and whether theory expected them
    Phases        a phase diagram: verdicts over a grid of parameters

Read next: run_simulation.py and parameter_sweep.py (how they are made), theory_curves.py (what theory says of them),
../reporting/simulation_page.py and ../reporting/phases_page.py (how they are shown).
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .._displays import shown
from .._settings import flags
from .._typing import Float, Tensor
from ..dynamics.evolution import Trajectory
from ..dynamics.verdict import CloudVerdict
from .grid import Range, grid_text
from .presets import Preset, meets, preset_of
from .settings import OWN, SimulationSettings


@dataclass(frozen=True)
class Simulation:
    """What was simulated and what was seen.

    start: the clouds at first.
    frames: tokens of the first cloud at each look.
    preset: where the settings come from, if they are those of a preset.
    """

    settings: SimulationSettings
    start: Float[Tensor, "b n d"]
    trajectory: Trajectory
    frames: Float[Tensor, "t n d"]
    preset: Preset | None = None

    @cached_property
    def verdicts(self) -> list[CloudVerdict]:
        """What has become of each cloud."""
        return self.trajectory.verdicts

    @property
    def verdict(self) -> CloudVerdict:
        """What has become of the first cloud."""
        return self.verdicts[0]

    @cached_property
    def met(self) -> list[bool]:
        """Whether each cloud did what theory expects; none if it expects nothing."""
        if self.preset is None or not self.preset.expects:
            return []
        expects, seen = self.preset.expects, self.trajectory.observed
        return [
            meets(expects, v.kind, v.evidence.get("clusters", 0.0), {
                **{name: float(x[-1, i]) for name, x in seen.items()},
                **{f"start {name}": float(x[0, i]) for name, x in seen.items()},
            })
            for i, v in enumerate(self.verdicts)
        ]  # fmt: skip

    @property
    def command(self) -> str:
        """The command line that makes the same page again; the call, of a cloud that no command knows."""
        if self.settings.initial == OWN:
            own = replace(
                SimulationSettings(), initial=OWN, **{n: getattr(self.settings, n) for n in ("tokens", "dim", "seeds")}
            )
            options = {n: v for n, v in asdict(self.settings).items() if v != getattr(own, n)}
            return f"gradlogz.simulate({', '.join(['cloud', *(f'{n}={v!r}' for n, v in options.items())])})"
        base = SimulationSettings() if self.preset is None else self.preset.settings
        name = [] if self.preset is None else [self.preset.name]
        return " ".join(["gradlogz simulate", *name, *flags(self.settings, base)])

    def _repr_html_(self) -> str:
        """The page inside a notebook, apart from the styles of the notebook."""
        html: str = shown(self, "html")
        return html


class GridPoint(NamedTuple):
    """How the clouds of one point of the grid ended.

    share: of the clouds that ended as most did.
    evidence: medians over these.
    """

    kind: str
    share: float
    evidence: dict[str, float]


@dataclass(frozen=True)
class Phases:
    """A phase diagram: axes, and what was found at each point of the grid that was reached, by its indices."""

    settings: SimulationSettings
    ranges: tuple[Range, ...]
    points: dict[tuple[int, ...], GridPoint]
    preset: str | None = None

    @property
    def grid(self) -> str:
        """The grid as the command line takes it."""
        return grid_text(self.ranges)

    @property
    def command(self) -> str:
        """The command line that makes the same page again."""
        name = [] if self.preset is None else [self.preset]
        words = flags(self.settings, base_of(self.preset))
        return " ".join(["gradlogz simulate", *name, f'--sweep "{self.grid}"', *words])

    @property
    def complete(self) -> bool:
        """Whether every point of the grid was reached."""
        return len(self.points) == math.prod(len(r.values) for r in self.ranges)

    def _repr_html_(self) -> str:
        """The page inside a notebook, apart from the styles of the notebook."""
        html: str = shown(self, "html")
        return html


def base_of(preset: str | None) -> SimulationSettings:
    """The settings of a sweep where the grid says nothing: those of a preset, or 200 tokens, 300 steps, one seed."""
    return SimulationSettings(tokens=200, steps=300, seeds=1) if preset is None else preset_of(preset).settings
