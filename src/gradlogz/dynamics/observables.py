"""Observables of a cloud of tokens.

    radius              sqrt(E|x|²)                                  root mean square length
    mean_fraction       |E x|² / E|x|²                               1: all tokens are equal
    effective_rank      exp of the entropy of the normalised eigenvalues of the covariance; NaN for equal tokens
    log_det             log det of the covariance / 2                the entropy of a Gaussian cloud, up to a constant
    rank_one_residual   |X - 1 m'| / |X| in sqrt(|.|_1 |.|_inf)      0: all tokens are equal           [dong21]
    log_pair_energy     log sum_ij exp(beta <x_i, B x_j>)            never decreases                 [theory 5.3]
    log_normalizers     sum_i G_i                                    conjectured never to decrease    [theory 5.3]
    entropy             entropy of the attention weights, mean over tokens
    self_weight         a_ii, mean over tokens                       near 1 the cloud is frozen       [theory 10.3]
    displacement        |x' - x| / radius, root mean square          last step
    expansion           log tr C(x + tau A(x)) - log tr C(x)         ascent of the last step
    contraction         log tr C(x') - log tr C(x + tau A(x))        contraction of the last step
    skewness, kurtosis  Mardia's, 0 for a Gaussian
    sliced_wasserstein  distance of the whitened cloud to N(0, I), mean over directions; positive under the null
    clusters            connected components at 5 % of the radius
    within              root mean square distance of tokens to the mean of their component, relative to the radius

Read next: gaussian_null.py (null distributions), evolution.py (records them over time).
"""

from typing import Any, NamedTuple

import torch

from .._typing import Float, Tensor
from .contraction import moments_of

LINK = 0.05  # distance, relative to the radius, below which two tokens are linked
SAMPLE = 600  # largest number of tokens that are compared in pairs
DIRECTIONS = 64
ROUNDING = 16  # times eps of the radius: the spread of tokens that are equal to rounding is at most 3 in experiments


class AttentionRecord(NamedTuple):
    """Statistics of one attention call: log normalisers, entropies, and the logits of tokens with themselves."""

    log_normalizer: Float[Tensor, "*b h n"]
    entropy: Float[Tensor, "*b h n"] | None
    self_logit: Float[Tensor, "*b h n"] | None


class CloudStep(NamedTuple):
    """The last step of a cloud: tokens before it, after its ascent, and after its contraction."""

    before: Float[Tensor, "*b n d"]
    ascended: Float[Tensor, "*b n d"]
    after: Float[Tensor, "*b n d"]


def radius(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return x.square().sum(-1).mean(-1).sqrt()


def mean_fraction(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return x.mean(-2).square().sum(-1) / x.square().sum(-1).mean(-1).clamp(min=torch.finfo(x.dtype).tiny)


def effective_rank(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return rank_of(moments_of(x)[1], x.square().sum(-1).mean(-1))


def rank_of(covariance: Float[Tensor, "*b d d"], squared_radius: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Effective rank of a covariance; NaN where tokens of this radius are equal to rounding, and it is noise.

    A cloud may collapse without losing a dimension, so that no value is its limit.
    """
    values = torch.linalg.eigvalsh(covariance).clamp(min=0.0)
    total = values.sum(-1)
    p = values / total.unsqueeze(-1).clamp(min=torch.finfo(values.dtype).tiny)
    rounding = (ROUNDING * torch.finfo(values.dtype).eps) ** 2 * squared_radius
    return (-torch.special.xlogy(p, p).sum(-1)).exp().masked_fill(total <= rounding, torch.nan)


def log_det(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return torch.linalg.eigvalsh(moments_of(x)[1]).clamp(min=0.0).log().sum(-1) / 2


def rank_one_residual(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Norm of the token matrix minus its mean row, relative to the norm of the token matrix.

    |R| = sqrt(max_j sum_i |R_ij| · max_i sum_j |R_ij|) is the composite norm of [dong21], whose residual is the minimum
    of |X - 1 v'| over all rows v. The mean row attains the minimum in the Frobenius norm; in the composite norm its
    residual is at most 2 (1 - 1/n) times the minimum.
    """
    return _composite(x - x.mean(-2, keepdim=True)) / _composite(x).clamp(min=torch.finfo(x.dtype).tiny)


def _composite(x: Tensor) -> Tensor:
    return (x.abs().sum(-2).amax(-1) * x.abs().sum(-1).amax(-1)).sqrt()


def log_pair_energy(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return record.log_normalizer.flatten(-2).logsumexp(-1)


def log_normalizers(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return record.log_normalizer.sum((-2, -1))


def entropy(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    return torch.full_like(x[..., 0, 0], torch.nan) if record.entropy is None else record.entropy.mean((-2, -1))


def self_weight(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    if record.self_logit is None:
        return torch.full_like(x[..., 0, 0], torch.nan)
    return (record.self_logit - record.log_normalizer).clamp(max=0.0).exp().mean((-2, -1))


def displacement(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    if step is None:
        return torch.full_like(x[..., 0, 0], torch.nan)
    moved = (step.after - step.before).square().sum(-1).mean(-1).sqrt()
    return moved / radius(x, record, step).clamp(min=torch.finfo(x.dtype).tiny)


def expansion(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Log ratio of total variances, equal to that of the mean squared distances of pairs, 2 tr C n / (n - 1)."""
    return torch.full_like(x[..., 0, 0], torch.nan) if step is None else _spread(step.ascended) - _spread(step.before)


def contraction(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Log ratio of total variances from the ascent to the recorded cloud, including a feed-forward map."""
    return torch.full_like(x[..., 0, 0], torch.nan) if step is None else _spread(x) - _spread(step.ascended)


def _spread(x: Tensor) -> Tensor:
    return x.var(-2, correction=0).sum(-1).clamp(min=torch.finfo(x.dtype).tiny).log()


def skewness(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """E (z_i · z_j)^3 over pairs, z standardised: the squared norm of the third moment, at cost d^3 and not n^2."""
    z = standardised(x)
    third = torch.einsum("...ni,...nj,...nk->...ijk", z, z, z) / x.shape[-2]
    return third.square().sum((-3, -2, -1))


def kurtosis(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """E |z|^4 - d (d + 2), z standardised."""
    d = x.shape[-1]
    return standardised(x).square().sum(-1).square().mean(-1) - d * (d + 2)


def sliced_wasserstein(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Sliced Wasserstein distance of the whitened cloud to a standard Gaussian.

    It is the mean over directions of the root mean square distance of sorted projections to the quantiles of N(0, 1).
    """
    z, n = standardised(x), x.shape[-2]
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(x.shape[-1], DIRECTIONS, generator=generator, dtype=torch.float64).to(x)
    directions = directions / directions.norm(dim=0)
    quantiles = torch.special.ndtri((torch.arange(n, device=x.device, dtype=x.dtype) + 0.5) / n)
    return ((z @ directions).sort(-2).values - quantiles.unsqueeze(-1)).square().mean(-2).sqrt().mean(-1)


def clusters(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Number of connected components if tokens closer than 5 % of the radius are linked; at most 600 tokens."""
    labels, _ = components(x.reshape(-1, *x.shape[-2:]))
    return (labels == torch.arange(labels.shape[-1], device=x.device)).sum(-1).reshape(x.shape[:-2])


def components(x: Float[Tensor, "b n d"]) -> tuple[Tensor, Float[Tensor, "b m d"]]:
    """Component labels (the index of the first token in each) of at most 600 tokens, and these tokens."""
    n, size = x.shape[-2], x.square().sum(-1).mean(-1).sqrt()
    if n > SAMPLE:
        x = x[:, torch.linspace(0, n - 1, SAMPLE, device=x.device).round().long()]
    near = torch.cdist(x, x) <= LINK * size[:, None, None]
    labels = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    while True:  # every token takes the smallest label among its neighbours, until none changes
        least = torch.where(near, labels.unsqueeze(-2), x.shape[1]).amin(-1)
        least = least.gather(-1, least)  # pointer jumping: the reach doubles with each iteration
        if bool((least == labels).all()):
            return labels, x
        labels = least


def within(x: Tensor, record: AttentionRecord, step: CloudStep | None) -> Tensor:
    """Root mean square distance of tokens to the mean of their component, relative to the radius.

    Near 0 the components are clusters; a dense cloud is one component but not a cluster.
    """
    labels, tokens = components(x.reshape(-1, *x.shape[-2:]))
    index = labels.unsqueeze(-1).expand_as(tokens)
    sums = torch.zeros_like(tokens).scatter_add(-2, index, tokens)
    counts = torch.zeros_like(tokens).scatter_add(-2, index, torch.ones_like(tokens))
    apart = tokens - (sums / counts.clamp(min=1.0)).gather(-2, index)
    size = tokens.square().sum(-1).mean(-1).clamp(min=torch.finfo(x.dtype).tiny)
    return (apart.square().sum(-1).mean(-1) / size).sqrt().reshape(x.shape[:-2])


OBSERVABLES: dict[str, Any] = {
    f.__name__: f
    for f in (
        radius, mean_fraction, effective_rank, log_det, rank_one_residual, log_pair_energy, log_normalizers, entropy,
        self_weight, displacement, expansion, contraction, skewness, kurtosis, sliced_wasserstein, clusters, within,
    )
}  # fmt: skip


def standardised(x: Tensor) -> Tensor:
    """The cloud with mean 0 and identity covariance on the range of its covariance."""
    mean, covariance = moments_of(x)
    values, vectors = torch.linalg.eigh(covariance)
    least = x.shape[-1] * torch.finfo(x.dtype).eps * values[..., -1:].clamp(min=torch.finfo(x.dtype).tiny)
    scale = torch.where(values > least, values.clamp(min=torch.finfo(x.dtype).tiny).rsqrt(), 0.0)
    return (x - mean.unsqueeze(-2)) @ (vectors * scale.unsqueeze(-2))
