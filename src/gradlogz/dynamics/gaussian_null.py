"""Null distributions of the observables: Gaussian clouds of the same size.

    given moments     n tokens of a Gaussian, conditioned on the mean and covariance of the cloud
                      x = m + sqrt(n) U sqrt(C),  U uniform over matrices with orthonormal columns that sum to 0
                      for skewness, kurtosis, sliced_wasserstein, clusters, within, rank_one_residual;
                      under the same ascent for log_pair_energy, log_normalizers, entropy, self_weight;
                      over one step from there for displacement, expansion, contraction
    given radius      n tokens of N(0, s² I), conditioned on the radius of the cloud
                      for mean_fraction, effective_rank, log_det, which the moments determine; unconditioned for radius
    Mardia            n b_1 / 6 ~ chi², b_2 ~ N(d (d + 2), 8 d (d + 2) / n), with corrections for small n

Mean and covariance are sufficient statistics of a Gaussian. Conditioned on them, the distribution of a sample does not
depend on the Gaussian, so the level of the interval is exact whichever Gaussian generated the cloud.

Read next: intervals.py, growth.py (`self_weight` for infinitely many tokens).
"""

import math

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..special.distributions import chi_square_quantile
from .contraction import ContractionLike, moments_of
from .evolution import Ascent, Placement, evolve
from .gaussian_cloud import GaussianCloud
from .intervals import ConfidenceBand, band_of_draws, in_pieces
from .observables import DIRECTIONS, OBSERVABLES, SAMPLE, AttentionRecord

GIVEN_RADIUS = ("radius", "mean_fraction", "effective_rank", "log_det")
ATTENTION = ("log_pair_energy", "log_normalizers", "entropy", "self_weight")
STEP = ("displacement", "expansion", "contraction")


def null_band(
    name: str,
    cloud: Float[Tensor, "*b n d"],
    ascent: Ascent | None = None,
    *,
    contraction: ContractionLike = "none",
    placement: Placement = "post",
    gaussian: GaussianCloud | None = None,
    level: float = 0.95,
    draws: int = 199,
    generator: torch.Generator | None = None,
) -> ConfidenceBand:
    """Interval of an observable under the null that the cloud is Gaussian: low, middle, high [*b].

    A value outside rejects the null. For `mean_fraction`, `effective_rank` and `log_det` the null is an isotropic
    Gaussian centred at 0. The cost is `draws` evaluations of the observable, in batches.

    Args:
        ascent: required by observables of attention (`entropy`, ...) and of a step (`displacement`, ...).
        contraction: contraction of the step, for observables of a step.
        placement: placement of that contraction.
        gaussian: draw from this Gaussian instead of the one with the moments of the cloud.
        level: coverage of the interval.
        draws: number of Gaussian clouds; one less than a multiple of 2 / (1 - level) is most efficient.

    Law: tests/laws/test_bands_hold_what_they_say.py.

    >>> import torch
    >>> x = torch.rand(500, 2, dtype=torch.float64)
    >>> band = null_band("kurtosis", x)
    >>> bool(band.holds(torch.tensor(-1.6))), bool(band.low < 0 < band.high)  # uniform tokens have kurtosis -2.4
    (False, True)
    """
    needs_ascent = name in ATTENTION + STEP
    _check(name, cloud, ascent, needs_ascent)
    values = []
    for k in in_pieces(draws, _numbers(name, cloud)):
        x = _drawn(name, cloud, gaussian, k, generator)
        if ascent is not None and needs_ascent:
            steps = int(name in STEP)
            trajectory = evolve(x, ascent, contraction=contraction, steps=steps, placement=placement, observe=[name])
            values.append(trajectory.observed[name][-1])
        else:
            values.append(OBSERVABLES[name](x, AttentionRecord(x.new_zeros(()), None, None), None))
    return band_of_draws(torch.cat(values).to(cloud.dtype), level=level)


def gaussian_clouds(
    cloud: Float[Tensor, "*b n d"], draws: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "m *b n d"]:
    """Gaussian samples conditioned on the mean and covariance of the cloud, [m, *b, n, d]."""
    n, d = cloud.shape[-2:]
    mean, covariance = moments_of(cloud)
    values, vectors = torch.linalg.eigh(covariance)
    k = min(d, n - 1)  # largest number of orthogonal columns that sum to 0, and of directions of the covariance
    z = _normal((draws, *cloud.shape[:-1], k), cloud, generator)
    z = z - z.mean(-2, keepdim=True)
    # Gram-Schmidt by the Cholesky factor of the Gram matrix: uniformly distributed orthonormal columns.
    U = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z), z.mT, upper=False).mT
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2))[..., d - k :]
    return mean.unsqueeze(-2) + math.sqrt(n) * U @ root.mT


def mardia_band(name: str, n: int, dim: int, *, level: float = 0.95) -> ConfidenceBand:
    """Interval of `skewness` or `kurtosis` for n Gaussian tokens, by Mardia's asymptotic distributions.

        skewness   n b_1 / 6 · (d+1)(n+1)(n+3) / (n ((n+1)(d+1) - 6))  ~ chi² with d (d+1) (d+2) / 6 degrees
        kurtosis   normal with mean d (d+2) (n-1) / (n+1) and variance
                   8 d (d+2) (n-3) (n-d-1) (n-d+1) / ((n+1)² (n+3) (n+5))                              [mardia74]

    The moments are exact for every n, the shape of the distribution is not: for few tokens use `null_band`.
    """
    if name not in ("skewness", "kurtosis") or not 0 < level < 1 or dim < 1 or n <= dim + 1:
        condition = 'name must be "skewness" or "kurtosis", level in (0, 1) and n above dim + 1'
        fact, remedy = f"{name!r}, level={level}, n={n} and dim={dim}", "Use null_band for other observables."
        raise InputValueError("mardia_band", "name", f"{condition}, got {fact}", remedy)
    d, tails = dim, torch.tensor([(1 - level) / 2, 0.5, (1 + level) / 2], dtype=torch.float64)
    if name == "kurtosis":
        mean = d * (d + 2) * (n - 1) / (n + 1) - d * (d + 2)
        variance = 8 * d * (d + 2) * (n - 3) * (n - d - 1) * (n - d + 1) / ((n + 1) ** 2 * (n + 3) * (n + 5))
        return ConfidenceBand(*(mean + math.sqrt(variance) * torch.special.ndtri(tails)))
    scale = 6 * ((n + 1) * (d + 1) - 6) / ((d + 1) * (n + 1) * (n + 3))
    degrees = tails.new_tensor(d * (d + 1) * (d + 2) / 6)
    return ConfidenceBand(*(scale * chi_square_quantile(p, degrees) for p in tails.tolist()))


def _numbers(name: str, cloud: Tensor) -> int:
    """Number of elements that computing an observable of the cloud holds at once."""
    n, d = cloud.shape[-2:]
    wide = {"sliced_wasserstein": DIRECTIONS, "clusters": min(n, SAMPLE), "within": min(n, SAMPLE), "skewness": d * d}
    return cloud.numel() // d * max(d, wide.get(name, d))


def _drawn(
    name: str, cloud: Tensor, gaussian: GaussianCloud | None, draws: int, generator: torch.Generator | None
) -> Tensor:
    if gaussian is not None:
        mean, covariance = (
            t.expand(draws, *cloud.shape[:-2], *t.shape[t.ndim - k :]) for k, t in enumerate(gaussian, 1)
        )
        return GaussianCloud(mean, covariance).sample(cloud.shape[-2], generator=generator)
    if name not in GIVEN_RADIUS:
        return gaussian_clouds(cloud, draws, generator=generator)
    z = _normal((draws, *cloud.shape), cloud, generator)
    size = cloud.square().mean((-2, -1), keepdim=True)
    return z * size.sqrt() if name == "radius" else z * (size / z.square().mean((-2, -1), keepdim=True)).sqrt()


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn on the device of the generator."""
    where = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=where, generator=generator).to(like.device)


def _check(name: str, cloud: Tensor, ascent: Ascent | None, needs_ascent: bool) -> None:
    if name not in OBSERVABLES:
        remedy = f"Choose from {', '.join(OBSERVABLES)}."
        raise InputValueError("null_band", "name", f"name must be an observable, got {name!r}", remedy)
    check_floats("null_band", cloud=cloud)
    if cloud.ndim < 2 or cloud.shape[-2] < 2:
        condition, remedy = "cloud must be [*b, n, d] with n >= 2", "Pass two or more tokens."
        raise InputValueError("null_band", "cloud", f"{condition}, got shape {shape_of(cloud)}", remedy)
    if needs_ascent and ascent is None:
        remedy = "Pass the ascent under which it was recorded."
        raise InputTypeError("null_band", "ascent", f"the observable {name} needs ascent=", remedy)
