"""Statements of the first draft note, on exponential families: equations 3-7, errata E30-E35.

E31 is in contrastive_statements.py, E36 in cloud_statements.py.

Read next: filter_statements.py (the second note, on filters).
"""

import torch

from .. import measures as gz
from .._typing import Tensor
from ..dynamics.contraction import LayerNorm
from .definition import FLOAT, line, normal, number, softmax_average
from .statement import Outcome, gap, statement, violation


@statement("N1 Eq. 3", "note 1 3.1", corrected="G(y) = log L{h}(-y) = log ∫ e^<y,x> h(dx)")
def log_laplace_transform() -> Outcome:
    x, log_step = line(-30.0, 30.0)
    mu, sigma, y = 0.4, 1.3, number(0.9)
    log_h = -(((x - mu) / sigma) ** 2) / 2 - number(sigma).log() - number(2 * torch.pi).log() / 2
    h = gz.Gaussian(number(mu).reshape(1), number(sigma**2).reshape(1, 1))
    return Outcome(gap(h.log_normalizer(y.reshape(1)), (log_h + y * x + log_step).logsumexp(0)))


@statement(
    "N1 Eq. 4, E30",
    "note 1 3.1",
    printed="p(x) = e^<y,x> / Σ over distinct points",
    corrected="duplicates count: p(x_n) = m_n e^<y,x_n> / Σ m e^<y,x>",
)
def multiplicities() -> Outcome:
    x, y = normal(4, 3, seed=1), normal(5, 3, seed=2)
    repeated = torch.cat((x, x[:1], x[:1]))
    counted = gz.Empirical.weighted(x, number(3.0, 1.0, 1.0, 1.0))
    twice = gz.Empirical(repeated)
    corrected = max(
        gap(counted.log_normalizer(y), torch.logsumexp(y @ repeated.T, -1)),
        gap(counted.mean(y), torch.softmax(y @ repeated.T, -1) @ repeated),
        gap(twice.covariance(y), counted.covariance(y)),
    )
    return Outcome(corrected, gap(gz.Empirical(x).mean(y), twice.mean(y)))


@statement("N1 Eq. 5", "note 1 3.1", corrected="self-attention: p(x_i | x_k) = softmax_i <x_k, x_i>")
def self_attention() -> Outcome:
    x = normal(6, 3, seed=1)
    return Outcome(gap(gz.Empirical(x).probabilities(x), torch.softmax(x @ x.T, -1)))


@statement(
    "N1 Eq. 7, E33",
    "note 1 3.1",
    printed="∇G = Gaussian-kernel Nadaraya-Watson",
    corrected="kernel e^<x,y>; Gaussian iff keys have weights exp(-β|x|²/2), or one norm",
)
def nadaraya_watson() -> Outcome:
    x, q, v, beta = normal(6, 3, seed=1), normal(4, 3, seed=2), normal(6, 2, seed=3), 0.7

    def estimate(kernel: Tensor) -> Tensor:
        return kernel @ v / kernel.sum(-1, keepdim=True)

    def gaussian(keys: Tensor) -> Tensor:
        return estimate(torch.exp(-beta * torch.cdist(q, keys) ** 2 / 2))

    h, even = gz.Empirical(x), x / x.norm(dim=-1, keepdim=True)
    corrected = max(
        gap(h.expect(v, beta * q), estimate(torch.exp(beta * q @ x.T))),
        gap(gz.Empirical(x, -beta * (x**2).sum(-1) / 2).expect(v, beta * q), gaussian(x)),
        gap(gz.Empirical(even).expect(v, beta * q), gaussian(even)),
    )
    return Outcome(corrected, gap(h.expect(v, beta * q), gaussian(x)))


@statement(
    "E34",
    "note 1 3.1",
    printed="ascent always diverges",
    corrected="G(η_t) >= G(η_0) + tτ|∇G(η_0)|²; it diverges iff ∇G(η_0) ≠ 0",
)
def divergence() -> Outcome:
    x, tau = normal(6, 3, seed=1), 0.3
    h, start = gz.Empirical(x), normal(4, 3, seed=2)
    eta, bound = start, (start @ x.T).logsumexp(-1)
    slope, shortfall = (softmax_average(start, x) ** 2).sum(-1), 0.0
    for _ in range(20):
        eta, bound = eta + tau * h.mean(eta), bound + tau * slope
        shortfall = max(shortfall, violation(bound, (eta @ x.T).logsumexp(-1)))
    still = gz.Empirical(torch.cat((x, -x)))  # ∇G(0) = 0
    rest = torch.zeros(3, dtype=FLOAT)
    moved = gap(rest + tau * still.mean(rest), rest)
    return Outcome(max(shortfall, moved))


@statement(
    "E35",
    "note 1 3.1",
    printed="layer norm makes the set of tokens a standard Gaussian",
    corrected="LN(x) = √D P x/|P x| token by token, P = I - 11^T/D",
)
def layer_norm_per_token() -> Outcome:
    x = normal(50, 6, seed=1) * number(1.0, 5.0, 1.0, 1.0, 1.0, 1.0) + 2.0
    P = torch.eye(6, dtype=FLOAT) - torch.full((6, 6), 1 / 6, dtype=FLOAT)
    normed = LayerNorm()(x)
    formula = 6**0.5 * (x @ P) / (x @ P).norm(dim=-1, keepdim=True)
    alone = LayerNorm()(x[:1])  # the other tokens do not matter
    corrected = max(gap(normed, formula), gap(alone, formula[:1]))
    return Outcome(corrected, gap(torch.cov(normed.T), torch.eye(6, dtype=FLOAT)))
