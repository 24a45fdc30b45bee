"""Predicted curves of observables.

    radius, mean_fraction, effective_rank   GaussianCloud: mean and covariance in closed form     [theory 4.4]
    mean_fraction, skewness, harmonic       initial value · growth^t, squared for the first two   [theory 4.4, 4.5]
    self_weight                             sigmoid(beta d c - beta² r² c / 2 - log n)            [theory 10.3]
    slope                                   self + (1 - self) (beta c + mean_fraction)            [theory 10.3]
    diameter without residual               at most (1 - sum_j min_i a_ij) of the previous one    [theory 5.5]
    log_pair_energy                         non-decreasing under residual ascent                  [theory 5.3]

No curve is fitted: each follows from the initial clouds, or from the radius and variance at each time.

Read next: final_quantities.py (the comparison at the end), ../reporting/simulation_page.py (which draws the curves).
"""

import math

import torch

from .._typing import Bool, Tensor
from ..dynamics.contraction import moments_of
from ..dynamics.gaussian_cloud import GaussianCloud
from ..dynamics.growth import fastest_degree, hermite_growth, self_weight, sphere_growth
from ..dynamics.observables import rank_of
from .initial_clouds import ascent_of, key_variance
from .records import Curve, Simulation
from .settings import SimulationSettings

ROUND_INITIAL = ("sphere", "circle")
TOKEN_NORMS = ("sphere", "rms_norm", "layer_norm")
WHITENINGS = ("zca", "pca", "cholesky", "monge")
FEW = 3  # largest dimension in which tokens on a sphere are far from Gaussian


def moments(simulation: Simulation) -> dict[str, Curve]:
    """Radius, share of the mean and effective rank of a Gaussian cloud with the initial moments, as medians over seeds.

    Empty without a closed form: with a causal mask, several heads, fixed keys other than a Gaussian measure, another
    placement than "post", or tokens on a circle or a low-dimensional sphere.
    """
    s = simulation.settings
    fixed = s.keys or s.key_measure == "sphere"
    round_ = (s.initial in ROUND_INITIAL or _on_sphere(s)) and not exact(s)
    if s.causal or s.heads > 1 or fixed or s.placement != "post" or round_:
        return {}
    ascent = ascent_of(s)
    gaussian = GaussianCloud(*moments_of(simulation.start))
    rows, times = [], simulation.trajectory.times.tolist()
    for now, then in zip(times, [*times[1:], times[-1]], strict=True):
        m, C = gaussian
        if not bool(torch.isfinite(C).all()):
            break
        size = m.square().sum(-1) + C.diagonal(dim1=-2, dim2=-1).sum(-1)
        rows.append((size.sqrt().median(), (m.square().sum(-1) / size).median(), rank_of(C, size).median()))
        try:
            gaussian = gaussian.evolve(ascent, contraction=s.contraction_names, steps=then - now)
        except ValueError:  # the covariance is no longer positive definite in this precision: the curve ends
            break
    columns = zip(*((float(a), float(b), float(c)) for a, b, c in rows), strict=True)
    formula = (
        "exact" if exact(s) else "moment closure" if s.contraction.split("+")[-1] in TOKEN_NORMS else "closed form"
    )
    names = ("radius", "mean_fraction", "effective_rank")
    return {name: Curve(list(values), formula) for name, values in zip(names, columns, strict=True)}


def exact(settings: SimulationSettings) -> bool:
    """True if the moments of every cloud have a closed form: affine steps on Gaussian keys, affine contractions."""
    s = settings
    affine = not any(part in TOKEN_NORMS for part in s.contraction.split("+"))
    return s.key_measure == "gaussian" and affine and s.placement == "post" and not s.draws


def growth(simulation: Simulation) -> tuple[str, Curve] | None:
    """The observable of the first unstable mode, and its predicted exponential growth from the initial value."""
    s = simulation.settings
    last = s.contraction.split("+")[-1]
    if not s.plain or s.causal or s.heads > 1 or s.keys or s.placement != "post" or not s.residual or s.beta <= 0:
        return None
    dim = s.dim - 1 if last == "layer_norm" else s.dim
    if "harmonic" in simulation.trajectory.observed:
        degree = fastest_degree(dim=2, beta=s.beta)
        name, formula, factor = "harmonic", "harmonic", sphere_growth(degree, dim=2, beta=s.beta, tau=s.tau)
    elif s.contraction in TOKEN_NORMS and dim >= 2:
        r = 1.0 if last == "sphere" else math.sqrt(s.dim)
        name, formula, degree = "mean_fraction", "sphere mean", 1
        factor = sphere_growth(1, dim=dim, beta=s.beta, tau=s.tau, radius=r)
    elif s.contraction in WHITENINGS and "skewness" in simulation.trajectory.observed:
        name, formula, degree = "skewness", "hermite", 3
        factor = hermite_growth(3, variance=1.0, beta=s.beta, tau=s.tau)
    else:
        return None
    if not math.isfinite(factor):
        return None
    first = float(simulation.trajectory.observed[name][0].median())
    most = float(simulation.trajectory.observed[name].nan_to_num(0.0).max())
    power = 1 if name == "harmonic" else 2  # the other two observables are quadratic in the mode
    rate = power * math.log(abs(factor)) if factor else -math.inf
    ends = math.log(2 * most / first) if first > 0 else 0.0  # beyond twice the largest value the curve is not drawn
    values = [
        first * math.exp(rate * t) if rate * t <= ends else math.nan for t in simulation.trajectory.times.tolist()
    ]
    return name, Curve(values, formula, factor, degree)


def weights(simulation: Simulation) -> dict[str, Curve]:
    """Self-weight and slope of attention in the limit of many tokens, for the radius and variance at each time.

    Logits are assumed Gaussian, which holds for Gaussian tokens and on high-dimensional spheres.
    """
    s, observed = simulation.settings, simulation.trajectory.observed
    if not s.plain or s.causal or s.heads > 1 or _on_sphere(s):
        return {}
    squared = observed["radius"].square().median(-1).values.tolist()
    means = observed["mean_fraction"].median(-1).values.tolist()
    self_weights, slopes = [], []
    for r2, mean in zip(squared, means, strict=True):
        c = key_variance(s) if s.keys else r2 * (1 - mean) / s.dim
        # Centred logits: that of a token with itself is beta r² (1 - mean), the others have variance beta² r² c.
        part = max(1 - mean, 1e-9)
        a = 0.0 if s.keys else self_weight(beta=s.beta, squared_radius=r2 * part, variance=c / part, n=s.tokens)
        self_weights.append(a)
        slopes.append(a + (1 - a) * (s.beta * c + (0.0 if s.keys else mean)))
    curves = {"slope": Curve(slopes, "slope, fixed keys" if s.keys else "slope")}
    return curves if s.keys else {**curves, "self_weight": Curve(self_weights, "self-weight")}


def hull(simulation: Simulation) -> tuple[list[float], Curve] | None:
    """Diameter of the first cloud under attention without residual, and Dobrushin's bound on it.   [theory 5.5]

    diam(x') <= (1 - sum_j min_i a_ij) diam(x) for one step; over several steps, the previous diameter.
    """
    s = simulation.settings
    alone = (
        s.plain and not (s.residual or s.causal or s.keys) and s.heads == 1 and s.tau == 1.0 and s.contraction == "none"
    )
    if not alone or simulation.frames.shape[1] < s.tokens:
        return None
    diameters, bounds = [], [math.nan]
    times = simulation.trajectory.times.tolist()
    for x, now, then in zip(simulation.frames, times, [*times[1:], times[-1] + 1], strict=True):
        diameters.append(float(torch.pdist(x).max()))
        least = float((s.beta * x @ x.mT).softmax(-1).amin(0).sum())
        bounds.append(diameters[-1] * (1 - least if then == now + 1 else 1.0))
    return diameters, Curve(bounds[:-1], "dobrushin")


def rising(simulation: Simulation) -> bool:
    """True if the pair energy cannot decrease: unmasked residual ascent, free or on a sphere.   [theory 5.3]"""
    s = simulation.settings
    plain = s.plain and not (s.causal or s.keys or s.heads > 1) and s.residual and s.placement == "post"
    return plain and s.tau > 0 and s.beta > 0 and s.contraction in ("none", "sphere", "rms_norm")


def energy_decreases(simulation: Simulation) -> Bool[Tensor, "t b"]:
    """Recording intervals in which the log pair energy of a cloud decreased by more than rounding."""
    values = simulation.trajectory.observed["log_pair_energy"].double()
    return values.diff(dim=0) < -1e-9 * values[:-1].abs().clamp(min=1.0)


def _on_sphere(settings: SimulationSettings) -> bool:
    """True if tokens lie on a circle or a low-dimensional sphere."""
    on = settings.initial in ROUND_INITIAL or settings.contraction.split("+")[-1] in TOKEN_NORMS
    return settings.initial == "circle" or (on and settings.dim <= FEW)
