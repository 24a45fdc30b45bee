"""Clouds run with a preset or with numbers of one's own, looked at as they go.

    simulate      runs the clouds of all seeds as one batch           -> Simulation
    Simulation    what was seen, its verdict, whether theory expected it, its page

Read next: theory_curves.py (what theory says of each curve), reporting.py (the page).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch

from .._errors import InputValueError, sentence, shape_of
from .._typing import Float, Tensor
from ..dynamics.evolution import Placement, Trajectory, evolve
from ..dynamics.growth import fastest_degree
from ..dynamics.mode_amplitudes import harmonic_mode
from ..dynamics.verdict import CloudVerdict
from .presets import DEFAULT, Preset, meets, preset_of
from .settings import OWN, Settings, ascent_of, changed, flags, starts

OBSERVED = (
    "radius", "mean_fraction", "effective_rank", "log_pair_energy", "entropy", "self_weight", "displacement",
    "expansion", "contraction", "kurtosis", "sliced_wasserstein", "clusters", "within",
)  # fmt: skip
CUBES = 64  # dimensions up to which the third moment is looked at: it has d³ numbers
SHOWN = 500  # tokens of the first cloud that are kept for the picture


@dataclass(frozen=True)
class Simulation:
    """What was simulated and what was seen.

    start: the clouds at first.
    frames: tokens of the first cloud at each look.
    preset: where the settings come from, if they are those of a preset.
    """

    settings: Settings
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
            own = replace(Settings(), initial=OWN, **{n: getattr(self.settings, n) for n in ("tokens", "dim", "seeds")})
            options = {n: v for n, v in asdict(self.settings).items() if v != getattr(own, n)}
            return f"gradlogz.simulate({', '.join(['cloud', *(f'{n}={v!r}' for n, v in options.items())])})"
        base = Settings() if self.preset is None else self.preset.settings
        name = [] if self.preset is None else [self.preset.name]
        return " ".join(["gradlogz simulate", *name, *flags(self.settings, base)])

    def page(self) -> str:
        """All of it as one HTML page. Needs the extra [report]."""
        from .reporting import page_of, rendered

        return rendered(page_of(self))

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        from ..page import write

        return write(path, self.page())

    def _repr_html_(self) -> str:
        """The page inside a notebook, apart from the styles of the notebook."""
        return f'<iframe srcdoc="{escape(self.page())}" style="width:100%;height:48rem;border:0"></iframe>'


def simulate(
    what: str | Float[Tensor, "*b n d"] = DEFAULT,
    *,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Simulation:
    """Run a preset, or a cloud of one's own, and look at it as it goes.

    Args:
        what: the name of a preset (gradlogz simulate --list), or a cloud [n, d] or one for each seed [b, n, d].
        progress: called with the number of steps that have been made.
        options: of `Settings`, in place of those of the preset: beta, tau, dim, tokens, steps, contraction, ...

    Law: tests/simulation/test_presets_end_as_theory_expects.py.

    >>> found = simulate("whitening-2-1", tokens=100, seeds=1)
    >>> found.verdict.kind, int(found.verdict.evidence["clusters"])
    ('clusters', 3)
    """
    preset: Preset | None = None
    if isinstance(what, Tensor):
        if what.ndim not in (2, 3) or not torch.isfinite(what).all():
            condition, remedy = "a cloud must be [n, d] or [b, n, d] and finite", "Name a preset otherwise."
            raise InputValueError(sentence("simulate", condition, f"shape {shape_of(what)}", remedy))
        cloud = what.double().reshape(-1, *what.shape[-2:])
        b, n, d = cloud.shape
        settings = replace(changed(Settings(), {**options, "tokens": n, "dim": d, "seeds": b}), initial=OWN)
    else:
        preset = preset_of(what)
        settings = changed(preset.settings, options)
        preset = preset if _same(settings, preset.settings) else None
        cloud = starts(settings)
    return Simulation(settings, cloud, *_run(settings, cloud, progress), preset)


def _same(settings: Settings, other: Settings) -> bool:
    """Whether theory expects the same of both: they differ in what is looked at alone."""
    free = {"seeds": 1, "seed": 0, "every": 0}
    return changed(settings, free) == changed(other, free)


def _run(settings: Settings, cloud: Tensor, progress: Callable[[int], None] | None) -> tuple[Trajectory, Tensor]:
    s, ascent = settings, ascent_of(settings)
    names = [*OBSERVED, *(["skewness"] if s.dim <= CUBES else [])]
    kept = torch.linspace(0, s.tokens - 1, min(SHOWN, s.tokens)).round().long()

    def went(state: Tensor | Trajectory, steps: int) -> Trajectory:
        every, where = max(steps, 1), placement_of(s.placement)
        return evolve(state, ascent, contraction=s.given, steps=steps, placement=where, observe=names, every=every)

    found = went(cloud, 0)
    frames, slopes = [found.cloud[0, kept]], [_slope(found)]
    degree = fastest_degree(dim=2, beta=s.beta) if s.dim == 2 and s.contraction == "sphere" and s.beta > 0 else 0
    harmonics = [harmonic_mode(cloud, degree)] if degree else []
    for time in s.looks[1:]:
        found = went(found, time - found.step)
        frames.append(found.cloud[0, kept])
        slopes.append(_slope(found))
        harmonics += [harmonic_mode(found.cloud, degree)] if degree else []
        if progress is not None:
            progress(time)
        if bool((found.blown >= 0).all()):
            break
    observed = {**found.observed, "slope": torch.stack(slopes)}
    if harmonics:
        observed["harmonic"] = torch.stack(harmonics)
    observed = {name: values for name, values in observed.items() if not bool(torch.isnan(values).all())}
    return found._replace(observed=observed), torch.stack(frames)


def placement_of(name: str) -> Placement:
    """The placement with this name, as evolve takes it."""
    return "pre" if name == "pre" else "peri" if name == "peri" else "post"


def _slope(trajectory: Trajectory) -> Tensor:
    """<attention, x> / |x|² over all tokens: how much of a query attention gives back."""
    x = trajectory.cloud
    return (trajectory.ascent.attended(x)[0] * x).sum((-2, -1)) / x.square().sum((-2, -1))
