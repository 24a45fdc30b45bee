"""Clouds run with a preset or with numbers of one's own, looked at as they go.

    simulate      runs the clouds of all seeds as one batch           -> Simulation

Read next: records.py (what comes out), theory_curves.py (what theory says of each curve).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from .._errors import InputValueError, shape_of
from .._progress import Progress, reporter
from .._settings import changed
from .._typing import Float, Tensor
from ..dynamics.evolution import Placement, Trajectory, evolve
from ..dynamics.growth import fastest_degree
from ..dynamics.mode_amplitudes import harmonic_mode
from .initial_clouds import ascent_of, starts
from .presets import DEFAULT, Preset, preset_of
from .records import Simulation
from .settings import OWN, SimulationSettings, check

OBSERVED = (
    "radius", "mean_fraction", "effective_rank", "log_pair_energy", "entropy", "self_weight", "displacement",
    "expansion", "contraction", "kurtosis", "sliced_wasserstein", "clusters", "within",
)  # fmt: skip
CUBES = 64  # dimensions up to which the third moment is looked at: it has d³ numbers
SHOWN = 500  # tokens of the first cloud that are kept for the picture


def simulate(
    what: str | Float[Tensor, "*b n d"] = DEFAULT,
    *,
    tokens: int | None = None,
    dim: int | None = None,
    beta: float | None = None,
    tau: float | None = None,
    contraction: str | None = None,
    initial: str | None = None,
    steps: int | None = None,
    placement: str | None = None,
    causal: bool | None = None,
    residual: bool | None = None,
    heads: int | None = None,
    keys: int | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    every: int | None = None,
    progress: Progress = False,
) -> Simulation:
    """Run a preset, or a cloud of one's own, and look at it as it goes.

    Arguments that are not listed are fields of `SimulationSettings`, in place of those of the preset; a cloud brings
    its own tokens, dim and seeds.

    Args:
        what: the name of a preset (gradlogz simulate --list), or a cloud [n, d] or one for each seed [b, n, d].
        progress: True shows a bar on standard error; a function is called with the steps made and all steps.

    Law: tests/simulation/test_presets_end_as_theory_expects.py.

    >>> found = simulate(dim=2, beta=1.0, tokens=100, seeds=1)
    >>> found.verdict.kind, int(found.verdict.evidence["clusters"])
    ('clusters', 3)
    """
    preset: Preset | None = None
    cloud: Tensor | None = None
    base = SimulationSettings()
    if isinstance(what, Tensor):
        if what.ndim not in (2, 3) or not torch.isfinite(what).all():
            condition, remedy = "a cloud must be [n, d] or [b, n, d] and finite", "Name a preset otherwise."
            raise InputValueError("simulate", "cloud", f"{condition}, got shape {shape_of(what)}", remedy)
        cloud = what.double().reshape(-1, *what.shape[-2:])
        seeds, tokens, dim = cloud.shape
    else:
        preset = preset_of(what)
        base = preset.settings
    settings = changed(
        base, tokens=tokens, dim=dim, beta=beta, tau=tau, contraction=contraction, initial=initial, steps=steps,
        placement=placement, causal=causal, residual=residual, heads=heads, keys=keys, seeds=seeds, seed=seed,
        every=every,
    )  # fmt: skip
    check(settings)
    if cloud is None:
        cloud = starts(settings)
        preset = preset if preset is not None and _same(settings, preset.settings) else None
    else:
        settings = replace(settings, initial=OWN)
    return Simulation(settings, cloud, *_run(settings, cloud, reporter(progress, "steps")), preset)


def _same(settings: SimulationSettings, other: SimulationSettings) -> bool:
    """Whether theory expects the same of both: they differ in what is looked at alone."""
    return settings == replace(other, seeds=settings.seeds, seed=settings.seed, every=settings.every)


def _run(settings: SimulationSettings, cloud: Tensor, show: Callable[[int, int], None]) -> tuple[Trajectory, Tensor]:
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
    looks = s.looks
    for time in looks[1:]:
        found = went(found, time - found.step)
        frames.append(found.cloud[0, kept])
        slopes.append(_slope(found))
        harmonics += [harmonic_mode(found.cloud, degree)] if degree else []
        blown = bool((found.blown >= 0).all())
        show(looks[-1] if blown else time, looks[-1])
        if blown:
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
