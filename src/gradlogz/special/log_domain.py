"""Log-sum-exp, softmax, entropy and draws for rows of log weights, which may be without mass.

    G = log sum_n exp s_n             log normaliser
    p_n = exp(s_n - G)                probabilities
    H = G - sum_n p_n s_n             Shannon entropy

A row without mass (all its entries are -inf) has G = -inf, p = 0, H = 0 and zero gradients; NaN stays NaN.

Read next: ../kernels/attention/reference.py (attention by these), ../measures/gating.py (merges of measures).
"""

import math

import torch

from .._typing import Bool, Float, Int, Tensor


def log_sum_exp(s: Float[Tensor, "*bm n"], *, maskable: bool = True) -> Float[Tensor, "*bm"]:
    """Log-sum-exp G_m = log sum_n exp s_mn; -inf with zero gradients where a row has no mass."""
    if not maskable:  # no row can be empty
        return s.logsumexp(-1)
    alive = has_mass(s)
    return torch.where(alive.squeeze(-1), s.masked_fill(~alive, 0.0).logsumexp(-1), -torch.inf)


def softmax(s: Float[Tensor, "*bm n"], *, maskable: bool = True) -> Float[Tensor, "*bm n"]:
    """Softmax p_mn = exp(s_mn - G_m); 0 with zero gradients where a row has no mass."""
    if not maskable:
        return s.softmax(-1)
    alive = has_mass(s)
    return s.masked_fill(~alive, 0.0).softmax(-1) * alive


def entropy(s: Float[Tensor, "*bm n"]) -> Float[Tensor, "*bm"]:
    """Entropy H_m = log sum_n exp(s_mn - max) - sum_n p_mn (s_mn - max), accurate also for large logits."""
    alive = has_mass(s)
    below = s.masked_fill(~alive, 0.0)
    below = below - below.detach().amax(-1, keepdim=True)
    mass = below.exp()
    total = mass.sum(-1)
    mean_below = (mass * below.masked_fill(below == -torch.inf, 0.0)).sum(-1) / total
    return (total.log() - mean_below) * alive.squeeze(-1)


def draw(s: Float[Tensor, "*bm n"], shape: tuple[int, ...], generator: torch.Generator | None) -> Int[Tensor, "*sbm"]:
    """Indices [*shape, *b, m] with probabilities softmax(s), by inversion: memory only for rows and draws."""
    total = softmax(s.detach().double()).cumsum(-1)
    u = torch.rand(*total.shape[:-1], math.prod(shape), dtype=total.dtype, device=s.device, generator=generator)
    # The first index whose cumulative mass exceeds u; it is never a point without mass.
    index = torch.searchsorted(total, u * total[..., -1:], right=True).clamp(max=s.shape[-1] - 1)
    return index.movedim(-1, 0).reshape(*shape, *s.shape[:-1])


def has_mass(s: Float[Tensor, "*bm n"]) -> Bool[Tensor, "*bm 1"]:
    """True where a row has an entry other than -inf."""
    return s.detach().amax(-1, keepdim=True) != -torch.inf
