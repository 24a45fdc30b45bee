"""What theory says of each curve, from the start of the clouds alone.

    radius, mean_fraction, effective_rank   GaussianCloud: the two moments in closed form         [theory 4.4]
    mean_fraction, skewness, harmonic       size at the start · growth^t, squared for the first two [theory 4.4, 4.5]
    self_weight                             sigmoid(beta r² - beta² r² c / 2 - log n)             [theory 10.3]
    slope                                   self + (1 - self) (beta c + mean fraction)            [theory 10.3]
    diameter without residual               at most (1 - sum_j min_i a_ij) of the one before      [theory 5.5]
    sliced_wasserstein, kurtosis, skewness  the band of a Gaussian cloud of the same size

Read next: ../reporting/simulation_page.py, which draws them beside what was seen.
"""

import math
from typing import NamedTuple

import torch

from .._typing import Float, Tensor
from ..dynamics.contraction import moments_of
from ..dynamics.gaussian_cloud import GaussianCloud
from ..dynamics.gaussian_null import mardia_band, null_band
from ..dynamics.growth import fastest_degree, hermite_growth, self_weight, sphere_growth
from ..dynamics.intervals import ConfidenceBand
from .initial_clouds import ascent_of
from .records import Simulation
from .settings import SimulationSettings

ROUND = ("sphere", "circle")
OF_TOKENS = ("sphere", "rms_norm", "layer_norm")
WHITENINGS = ("zca", "pca", "cholesky", "monge")
FEW = 3  # dimensions up to which tokens on a circle or sphere are nothing like Gaussian ones


class Curve(NamedTuple):
    """What theory says at each look, and what is to be known about it."""

    values: list[float]
    says: str


def moments(simulation: Simulation) -> dict[str, Curve]:
    """Radius, mean fraction and effective rank of a Gaussian cloud with the moments of the start; the median of seeds.

    Nothing where theory has no closed form: under a mask, several heads, frozen keys, another placement, or where the
    cloud starts on a circle or sphere, or is put on one of few dimensions.
    """
    s = simulation.settings
    if s.causal or s.heads > 1 or s.keys or s.placement != "post" or s.initial in ROUND or _round(s):
        return {}
    ascent = ascent_of(s)
    law = GaussianCloud(*moments_of(simulation.start))
    rows, times = [], simulation.trajectory.times.tolist()
    for now, then in zip(times, [*times[1:], times[-1]], strict=True):
        m, C = law
        if not bool(torch.isfinite(C).all()):
            break
        size = m.square().sum(-1) + C.diagonal(dim1=-2, dim2=-1).sum(-1)
        rows.append((size.sqrt().median(), (m.square().sum(-1) / size).median(), _rank(C).median()))
        try:
            law = law.evolve(ascent, contraction=s.given, steps=then - now)
        except ValueError:  # a covariance that is no longer one, in this precision: the curve ends here
            break
    found = zip(*((float(a), float(b), float(c)) for a, b, c in rows), strict=True)
    closed = "by the moment closure" if s.contraction.split("+")[-1] in OF_TOKENS else "in closed form"
    says = f"of a Gaussian cloud with the moments of the start, {closed}; holds while the cloud is Gaussian"
    return dict(zip(("radius", "mean_fraction", "effective_rank"), (Curve(list(v), says) for v in found), strict=True))


def growth(simulation: Simulation) -> tuple[str, Curve] | None:
    """The observable in which the first unstable mode shows, and how theory lets it grow from its size at the start."""
    s = simulation.settings
    last = s.contraction.split("+")[-1]
    if s.causal or s.heads > 1 or s.keys or s.placement != "post" or not s.residual or s.beta <= 0:
        return None
    dim = s.dim - 1 if last == "layer_norm" else s.dim
    if "harmonic" in simulation.trajectory.observed:
        degree = fastest_degree(dim=2, beta=s.beta)
        name, factor = "harmonic", sphere_growth(degree, dim=2, beta=s.beta, tau=s.tau)
        says = f"harmonic of degree {degree}, the fastest, times {factor:.4g} in each step"
    elif s.contraction in OF_TOKENS and dim >= 2:
        r = 1.0 if last == "sphere" else math.sqrt(s.dim)
        name, factor = "mean_fraction", sphere_growth(1, dim=dim, beta=s.beta, tau=s.tau, radius=r)
        says = f"the mean, mode 1 of the uniform sphere, times {factor:.4g} in each step"
    elif s.contraction in WHITENINGS and "skewness" in simulation.trajectory.observed:
        name, factor = "skewness", hermite_growth(3, variance=1.0, beta=s.beta, tau=s.tau)
        says = f"Hermite mode 3, the first that whitening leaves, times {factor:.4g} in each step"
    else:
        return None
    first = float(simulation.trajectory.observed[name][0].median())
    most = float(simulation.trajectory.observed[name].nan_to_num(0.0).max())
    power = 1 if name == "harmonic" else 2  # the others are squares
    rate = power * math.log(abs(factor)) if factor else -math.inf
    ends = math.log(2 * most / first) if first > 0 else 0.0  # past this the curve says nothing
    values = [
        first * math.exp(rate * t) if rate * t <= ends else math.nan for t in simulation.trajectory.times.tolist()
    ]
    return name, Curve(values, f"{says}; holds while it is small")


def weights(simulation: Simulation) -> dict[str, Curve]:
    """Self weight and slope that the law of many tokens gives for the radius and the variance seen at each time.

    Logits are taken to be Gaussian, as they are of Gaussian tokens, and on spheres of many dimensions.
    """
    s, seen = simulation.settings, simulation.trajectory.observed
    if s.causal or s.heads > 1 or _round(s):
        return {}
    squared = seen["radius"].square().median(-1).values.tolist()
    means = seen["mean_fraction"].median(-1).values.tolist()
    own, slope = [], []
    for r2, mean in zip(squared, means, strict=True):
        c = 1.0 if s.keys else r2 * (1 - mean) / s.dim
        # The logits about the mean: a token's own is beta r² (1 - mean), the others' have variance beta² r² c.
        part = max(1 - mean, 1e-9)
        a = 0.0 if s.keys else self_weight(beta=s.beta, squared_radius=r2 * part, variance=c / part, n=s.tokens)
        own.append(a)
        slope.append(a + (1 - a) * (s.beta * c + (0.0 if s.keys else mean)))
    says = "of many Gaussian tokens with the radius and variance seen at that time"
    found = {"slope": Curve(slope, f"self + (1 - self)(beta c + mean fraction) {says}")}
    return (
        found if s.keys else {**found, "self_weight": Curve(own, f"sigmoid(beta r² - beta² r² c / 2 - log n) {says}")}
    )


def hull(simulation: Simulation) -> tuple[list[float], Curve] | None:
    """The diameter of the first cloud under attention alone, and the bound of Dobrushin on it.   [theory 5.5]

    diam(x') <= (1 - sum_j min_i a_ij) diam(x) in one step; over several, no more than before.
    """
    s = simulation.settings
    alone = not (s.residual or s.causal or s.keys) and s.heads == 1 and s.tau == 1.0 and s.contraction == "none"
    if not alone or simulation.frames.shape[1] < s.tokens:
        return None
    diameters, bounds = [], [math.nan]
    times = simulation.trajectory.times.tolist()
    for x, now, then in zip(simulation.frames, times, [*times[1:], times[-1] + 1], strict=True):
        diameters.append(float(torch.pdist(x).max()))
        least = float((s.beta * x @ x.mT).softmax(-1).amin(0).sum())
        bounds.append(diameters[-1] * (1 - least if then == now + 1 else 1.0))
    says = "no more than (1 - sum_j min_i a_ij) times the diameter of the step before, or that at the look before"
    return diameters, Curve(bounds[:-1], says)


def null(simulation: Simulation, name: str) -> ConfidenceBand | None:
    """Where an observable of a Gaussian cloud of the same size lies, 95 times in 100."""
    s = simulation.settings
    if name in ("skewness", "kurtosis") and s.tokens > s.dim + 1:
        return mardia_band(name, s.tokens, s.dim)
    if name == "sliced_wasserstein" and s.tokens > s.dim + 1:
        return null_band(name, simulation.start[0], generator=torch.Generator().manual_seed(s.seed))
    return None


def rising(simulation: Simulation) -> bool:
    """Whether the pair energy must not decrease: residual ascent, unmasked, alone or on a sphere.   [theory 5.3]"""
    s = simulation.settings
    plain = not (s.causal or s.keys or s.heads > 1) and s.residual and s.placement == "post"
    return plain and s.tau > 0 and s.beta > 0 and s.contraction in ("none", "sphere", "rms_norm")


def _round(settings: SimulationSettings) -> bool:
    """Whether tokens lie on a circle, or on a sphere of few dimensions."""
    on = settings.initial in ROUND or settings.contraction.split("+")[-1] in OF_TOKENS
    return settings.initial == "circle" or (on and settings.dim <= FEW)


def _rank(covariance: Float[Tensor, "*b d d"]) -> Tensor:
    """exp of the entropy of the eigenvalues, made to sum to 1."""
    values = torch.linalg.eigvalsh(covariance).clamp(min=0.0)
    p = values / values.sum(-1, keepdim=True)
    return (-torch.special.xlogy(p, p).sum(-1)).exp()
