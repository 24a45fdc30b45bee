"""Simulation of a preset or a custom cloud, with its observables recorded over time.

    simulate      evolve the clouds of all seeds as one batch           -> Simulation

Read next: records.py (the results), theory_curves.py (the predicted curves).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .._errors import InputValueError, shape_of
from .._progress import Progress, reporter
from .._settings import changed
from .._typing import Float, Tensor
from ..dynamics.evolution import Placement, Trajectory, evolve
from ..dynamics.growth import fastest_degree
from ..dynamics.mode_amplitudes import harmonic_mode
from .initial_clouds import ascent_of, starts
from .matrix_text import MatrixLike, text_of
from .presets import DEFAULT, Preset, preset_of
from .records import Simulation
from .settings import CUSTOM, SimulationSettings, check

OBSERVED = (
    "radius", "mean_fraction", "effective_rank", "log_pair_energy", "entropy", "self_weight", "displacement",
    "expansion", "contraction", "kurtosis", "sliced_wasserstein", "clusters", "within",
)  # fmt: skip
SKEWNESS_DIM = 64  # largest dimension for which skewness is recorded: the third moment has d³ entries
FRAME_TOKENS = 500  # tokens of the first cloud that are stored for the animation


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
    key_measure: str | None = None,
    key_mean: MatrixLike | None = None,
    key_covariance: MatrixLike | None = None,
    qk_matrix: MatrixLike | None = None,
    ov_matrix: MatrixLike | None = None,
    natural: bool | None = None,
    draws: int | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    every: int | None = None,
    progress: Progress = False,
) -> Simulation:
    """Simulate a preset or a custom cloud under repeated attention, and record its observables.

    The other arguments are fields of `SimulationSettings` and replace those of the preset. A custom cloud determines
    tokens, dim and seeds. Means, covariances and matrices are a number, a vector (of a matrix: its diagonal) or a
    matrix, as a tensor, as sequences of numbers or as the text of the settings.

    Args:
        what: name of a preset (`gradlogz simulate --list`), or a cloud [n, d], or one cloud per seed [b, n, d].
        progress: True shows a bar on standard error; a function is called with the completed and the total number of
            steps.

    Law: tests/simulation/test_presets_end_as_theory_expects.py.

    >>> simulation = simulate(dim=2, beta=1.0, tokens=100, seeds=1)
    >>> simulation.verdict.kind, int(simulation.verdict.evidence["clusters"])
    ('clusters', 3)
    """
    preset: Preset | None = None
    cloud: Tensor | None = None
    base = SimulationSettings()
    if isinstance(what, Tensor):
        if what.ndim not in (2, 3) or not torch.isfinite(what).all():
            problem = f"cloud must be finite, of shape [n, d] or [b, n, d], got shape {shape_of(what)}"
            raise InputValueError("simulate", "cloud", problem, "Pass such a tensor, or the name of a preset.")
        cloud = what.double().reshape(-1, *what.shape[-2:])
        seeds, tokens, dim = cloud.shape
    else:
        preset = preset_of(what)
        base = preset.settings
    settings = changed(
        base, tokens=tokens, dim=dim, beta=beta, tau=tau, contraction=contraction, initial=initial, steps=steps,
        placement=placement, causal=causal, residual=residual, heads=heads, keys=keys, key_measure=key_measure,
        key_mean=text_of("key_mean", key_mean), key_covariance=text_of("key_covariance", key_covariance),
        qk_matrix=text_of("qk_matrix", qk_matrix), ov_matrix=text_of("ov_matrix", ov_matrix), natural=natural,
        draws=draws, seeds=seeds, seed=seed, every=every,
    )  # fmt: skip
    check(settings)
    if cloud is None:
        cloud = starts(settings)
        preset = preset if preset is not None and _same_prediction(settings, preset.settings) else None
    else:
        settings = replace(settings, initial=CUSTOM)
    return Simulation(settings, cloud, *_run(settings, cloud, reporter(progress, "steps")), preset)


def _same_prediction(settings: SimulationSettings, other: SimulationSettings) -> bool:
    """True if two settings differ only in seeds and recording interval, so that one prediction holds for both."""
    return settings == replace(other, seeds=settings.seeds, seed=settings.seed, every=settings.every)


def _run(settings: SimulationSettings, cloud: Tensor, show: Callable[[int, int], None]) -> tuple[Trajectory, Tensor]:
    s, ascent = settings, ascent_of(settings)
    names = [*OBSERVED, *(["skewness"] if s.dim <= SKEWNESS_DIM else [])]
    shown = torch.linspace(0, s.tokens - 1, min(FRAME_TOKENS, s.tokens)).round().long()

    def advanced(state: Tensor | Trajectory, steps: int) -> Trajectory:
        """The trajectory after so many steps, of which only the last is recorded."""
        options: dict[str, Any] = {
            "contraction": s.contraction_names, "placement": placement_of(s.placement), "observe": names
        }  # fmt: skip
        if steps > 1:  # observed too, but never recorded: with entropies the kernel has other last bits
            state = evolve(state, ascent, steps=steps - 1, every=s.steps + 1, **options)
        return evolve(state, ascent, steps=min(steps, 1), **options)

    trajectory = advanced(cloud, 0)
    frames, slopes = [trajectory.cloud[0, shown]], [_slope(trajectory)]
    degree = fastest_degree(dim=2, beta=s.beta) if s.dim == 2 and s.contraction == "sphere" and s.beta > 0 else 0
    harmonics = [harmonic_mode(cloud, degree)] if degree else []
    times = s.recorded_steps
    for time in times[1:]:
        trajectory = advanced(trajectory, time - trajectory.step)
        frames.append(trajectory.cloud[0, shown])
        slopes.append(_slope(trajectory))
        harmonics += [harmonic_mode(trajectory.cloud, degree)] if degree else []
        diverged = bool((trajectory.blown >= 0).all())
        show(times[-1] if diverged else time, times[-1])
        if diverged:
            break
    observed = {**trajectory.observed, "slope": torch.stack(slopes)}
    if harmonics:
        observed["harmonic"] = torch.stack(harmonics)
    observed = {name: values for name, values in observed.items() if not bool(torch.isnan(values).all())}
    return trajectory._replace(observed=observed), torch.stack(frames)


def placement_of(name: str) -> Placement:
    """The placement of this name, as a literal for `evolve`."""
    return "pre" if name == "pre" else "peri" if name == "peri" else "post"


def _slope(trajectory: Trajectory) -> Tensor:
    """Slope of attention along the query, <attention, x> / |x|² over all tokens."""
    x = trajectory.cloud
    return (trajectory.ascent.attended(x)[0] * x).sum((-2, -1)) / x.square().sum((-2, -1))
