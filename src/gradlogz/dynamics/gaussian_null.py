"""What a Gaussian cloud would show: the null of each observable.

    given moments     n tokens of a Gaussian, given that their mean and covariance are those of the cloud
                      x = m + sqrt(n) U sqrt(C),  U uniform among matrices of orthonormal columns that sum to 0
                      for skewness, kurtosis, sliced_wasserstein, clusters, within, rank_one_residual
                      and, under the same ascent, for log_pair_energy, log_normalizers, entropy, self_weight
                      and, over one step that starts there, for displacement, expansion, contraction
    given radius      n tokens of N(0, s² I), given that their radius is that of the cloud
                      for mean_fraction, effective_rank, log_det, which the moments fix; of `radius` its precision
    Mardia            n b_1 / 6 of chi², b_2 of N(d (d + 2), 8 d (d + 2) / n), with their corrections for small n

Mean and covariance say all that a sample says of its Gaussian, so that given them the law of a sample is known and a
band holds a Gaussian cloud with the probability that is asked for, whichever Gaussian it came from.

Read next: intervals.py, growth.py (`self_weight`, the law of infinitely many tokens).
"""

import math

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..special.distributions import chi_square_quantile
from .contraction import Given, moments_of
from .evolution import Ascent, Placement, evolve
from .gaussian_cloud import GaussianCloud
from .intervals import ConfidenceBand, band_of_draws, in_pieces
from .observables import DIRECTIONS, OBSERVABLES, SAMPLE, AttentionRecord

GIVEN_RADIUS = ("radius", "mean_fraction", "effective_rank", "log_det")
OF_ATTENTION = ("log_pair_energy", "log_normalizers", "entropy", "self_weight")
OF_A_STEP = ("displacement", "expansion", "contraction")


def null_band(
    name: str,
    cloud: Float[Tensor, "*b n d"],
    ascent: Ascent | None = None,
    *,
    contraction: Given = "none",
    placement: Placement = "post",
    law: GaussianCloud | None = None,
    level: float = 0.95,
    draws: int = 199,
    generator: torch.Generator | None = None,
) -> ConfidenceBand:
    """Where an observable would lie for a Gaussian cloud like this one, with this probability: low, middle, high [*b].

    Outside of it the cloud is not Gaussian, or, for `mean_fraction`, `effective_rank` and `log_det`, prefers a place or
    a direction. Costs `draws` times the observable; clouds are drawn in batches.

    Args:
        ascent: needed by observables of attention (`entropy`, ...) and of a step (`displacement`, ...).
        contraction: of the step, for these.
        placement: of the contraction in it.
        law: another null: samples of this law in place of the Gaussian that is like the cloud.
        draws: a multiple of 2 / (1 - level), less one, wastes none.

    Law: tests/laws/test_bands_hold_what_they_say.py.

    >>> import torch
    >>> x = torch.rand(500, 2, dtype=torch.float64)
    >>> band = null_band("kurtosis", x)
    >>> bool(band.holds(torch.tensor(-1.6))), bool(band.low < 0 < band.high)  # uniform tokens have kurtosis -2.4
    (False, True)
    """
    needs = name in OF_ATTENTION + OF_A_STEP
    _check(name, cloud, ascent, needs)
    found = []
    for k in in_pieces(draws, _numbers(name, cloud)):
        x = _drawn(name, cloud, law, k, generator)
        if ascent is not None and needs:
            steps = int(name in OF_A_STEP)
            made = evolve(x, ascent, contraction=contraction, steps=steps, placement=placement, observe=[name])
            found.append(made.observed[name][-1])
        else:
            found.append(OBSERVABLES[name](x, AttentionRecord(x.new_zeros(()), None, None), None))
    return band_of_draws(torch.cat(found).to(cloud.dtype), level=level)


def gaussian_clouds(
    cloud: Float[Tensor, "*b n d"], draws: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "m *b n d"]:
    """Samples of a Gaussian, given that their mean and covariance are those of the cloud."""
    n, d = cloud.shape[-2:]
    mean, covariance = moments_of(cloud)
    values, vectors = torch.linalg.eigh(covariance)
    k = min(d, n - 1)  # columns that sum to 0 and are orthogonal; the covariance has no more directions
    z = _normal((draws, *cloud.shape[:-1], k), cloud, generator)
    z = z - z.mean(-2, keepdim=True)
    # Gram and Schmidt: orthonormal columns of uniform law, by the triangular root of their products.
    U = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z), z.mT, upper=False).mT
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2))[..., d - k :]
    return mean.unsqueeze(-2) + math.sqrt(n) * U @ root.mT


def mardia_band(name: str, n: int, dim: int, *, level: float = 0.95) -> ConfidenceBand:
    """Where `skewness` or `kurtosis` of n Gaussian tokens lies, by the laws of Mardia for many tokens.

        skewness   n b_1 / 6 · (d+1)(n+1)(n+3) / (n ((n+1)(d+1) - 6))  of chi² with d (d+1) (d+2) / 6 degrees
        kurtosis   normal with mean d (d+2) (n-1) / (n+1) and variance
                   8 d (d+2) (n-3) (n-d-1) (n-d+1) / ((n+1)² (n+3) (n+5))                              [mardia74]

    The moments are exact for every n, the shape of the law is not: for few tokens ask `null_band`.
    """
    if name not in ("skewness", "kurtosis") or not 0 < level < 1 or dim < 1 or n <= dim + 1:
        condition = 'name must be "skewness" or "kurtosis", level in (0, 1) and n above dim + 1'
        fact, remedy = f"{name!r}, {level}, n={n} and dim={dim}", "Ask null_band for other observables."
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
    """How many numbers an observable of the cloud holds at once."""
    n, d = cloud.shape[-2:]
    wide = {"sliced_wasserstein": DIRECTIONS, "clusters": min(n, SAMPLE), "within": min(n, SAMPLE), "skewness": d * d}
    return cloud.numel() // d * max(d, wide.get(name, d))


def _drawn(
    name: str, cloud: Tensor, law: GaussianCloud | None, draws: int, generator: torch.Generator | None
) -> Tensor:
    if law is not None:
        mean, covariance = (t.expand(draws, *cloud.shape[:-2], *t.shape[t.ndim - k :]) for k, t in enumerate(law, 1))
        return GaussianCloud(mean, covariance).sample(cloud.shape[-2], generator=generator)
    if name not in GIVEN_RADIUS:
        return gaussian_clouds(cloud, draws, generator=generator)
    z = _normal((draws, *cloud.shape), cloud, generator)
    size = cloud.square().mean((-2, -1), keepdim=True)
    return z * size.sqrt() if name == "radius" else z * (size / z.square().mean((-2, -1), keepdim=True)).sqrt()


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Normal numbers, drawn where the generator is."""
    where = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=where, generator=generator).to(like.device)


def _check(name: str, cloud: Tensor, ascent: Ascent | None, needs: bool) -> None:
    if name not in OBSERVABLES:
        remedy = f"They are {', '.join(OBSERVABLES)}."
        raise InputValueError("null_band", "name", f"name must be that of an observable, got {name!r}", remedy)
    check_floats("null_band", cloud=cloud)
    if cloud.ndim < 2 or cloud.shape[-2] < 2:
        condition, remedy = "cloud must be [*b, n, d] with n above 1", "One token has no shape."
        raise InputValueError("null_band", "cloud", f"{condition}, got shape {shape_of(cloud)}", remedy)
    if needs and ascent is None:
        condition, remedy = f"ascent must be given for {name}", "Pass the ascent under which it was observed."
        raise InputTypeError("null_band", "ascent", f"{condition}, got none", remedy)
