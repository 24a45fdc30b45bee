"""Every statistic that `attend` returns, compared with sums over keys.   [note 2, Eq. 1-3; theory 3.5, 3.8, 3.9, 8.3]

Read next: ../attention/functional.py.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import attention as at
from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, normal
from .statement import Outcome, gap, statement


def _operands(m: int = 4, n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, m, 3, seed=1), normal(2, n, 3, seed=2), normal(2, n, 2, seed=3)


@statement(
    "3.5 attend",
    "theory",
    corrected="attend: output Σ p v, G = log Σ e^s, H = -Σ p log p, E = Σ p s, Σ p (s-E)², max s",
)
def statistics_of_attention() -> Outcome:
    q, k, v = _operands()
    result = at.attend(q, k, v, scale=0.8)
    s = q @ k.mT * 0.8
    p = torch.softmax(s, -1)
    mean = (p * s).sum(-1)
    expected = (
        p @ v,
        s.exp().sum(-1).log(),
        -(p * p.log()).sum(-1),
        mean,
        (p * (s - mean.unsqueeze(-1)) ** 2).sum(-1),
        s.amax(-1),
    )
    pairs = zip(result[:6], expected, strict=True)
    return Outcome(max(gap(actual, value) for actual, value in pairs if actual is not None))


@statement("3.5 temperature", "theory", corrected="logits β s: dG/dlog β = E, dH/dlog β = -variance of the logits")
def temperature() -> Outcome:
    q, k, v = _operands()
    log_beta = torch.zeros((), dtype=q.dtype, requires_grad=True)
    result = at.attend(q * log_beta.exp(), k, v, scale=1.0)
    p = torch.softmax(q @ k.mT, -1)
    mean = (p * (q @ k.mT)).sum(-1)
    variance = (p * (q @ k.mT - mean.unsqueeze(-1)) ** 2).sum(-1)
    (of_G,) = torch.autograd.grad(result.log_normalizer.sum(), log_beta, retain_graph=True)
    (of_H,) = torch.autograd.grad(result.entropy.sum(), log_beta)  # type: ignore[union-attr]
    return Outcome(max(gap(of_G, mean.sum(), 10.0), gap(of_H, -variance.sum(), 10.0)))


@statement(
    "3.8 merge",
    "theory",
    corrected="attention over blocks of keys merges exactly: G, entropy, variances of logits, keys, values",
)
def blocks_of_keys() -> Outcome:
    q, k, v = _operands(n=9)
    parts = [at.attend(q, k[:, i : i + 3], v[:, i : i + 3], statistics="moments") for i in (0, 3, 6)]
    s = q @ k.mT / 3**0.5
    p = torch.softmax(s, -1)
    joined = gz.merge(*parts)
    expected = {
        "output": p @ v,
        "log_normalizer": s.exp().sum(-1).log(),
        "entropy": -(p * p.log()).sum(-1),
        "logit_variance": (p * s**2).sum(-1) - (p * s).sum(-1) ** 2,
        "key_variance": (p @ k**2 - (p @ k) ** 2).sum(-1),
        "value_variance": p @ v**2 - (p @ v) ** 2,
    }
    return Outcome(max(gap(getattr(joined, name), value, 10.0) for name, value in expected.items()))


@statement(
    "3.9 sink", "theory", corrected="a sink is one more key at 0 with value 0 and its own logit, in every statistic"
)
def sinks() -> Outcome:
    q, k, v = _operands()
    logit = normal(2, seed=4)
    result = at.attend(q, k, v, sinks=logit)
    zero = torch.zeros(2, 1, 3, dtype=k.dtype)
    bias = torch.cat([torch.zeros(2, 4, 6, dtype=q.dtype), logit.view(2, 1, 1).expand(2, 4, 1)], -1)
    s = q @ torch.cat([k, zero], 1).mT / 3**0.5 + bias
    p = torch.softmax(s, -1)
    output = p @ torch.cat([v, zero[..., :2]], 1)
    pairs = (
        (result.output, output),
        (result.log_normalizer, s.exp().sum(-1).log()),
        (result.entropy, -(p * p.log()).sum(-1)),
        (result.logit_variance, (p * s**2).sum(-1) - (p * s).sum(-1) ** 2),
    )
    return Outcome(max(gap(actual, value, 10.0) for actual, value in pairs if actual is not None))


@statement(
    "8.3",
    "theory",
    corrected="covariance dropped by attention: diagonal att(V²) - att(V)² for values, trace ∇²G for keys",
)
def dropped_covariance() -> Outcome:
    q, k, v = _operands()
    result = at.attend(q, k, v, scale=1.0, statistics="moments")
    p = torch.softmax(q @ k.mT, -1)
    trace = (p @ k**2 - (p @ k) ** 2).sum(-1)
    pairs = ((result.value_variance, p @ v**2 - (p @ v) ** 2), (result.key_variance, trace), (result.key_mean, p @ k))
    return Outcome(max(gap(actual, value, 10.0) for actual, value in pairs if actual is not None))


# Note 2, section 2 --------------------------------------------------------------------------------------------------


@statement("N2 Eq. 1", "note 2 2", corrected="H_j = Σ_i A(Q_j,K_i) V_i, with Σ_i A_ij = 1 for every j")
def weighted_average_of_values() -> Outcome:
    q, k, v = normal(1, 4, 3, seed=1), normal(1, 5, 3, seed=2), normal(1, 5, 2, seed=3)
    A = (q[0] @ k[0].T).exp()
    A = A / A.sum(-1, keepdim=True)
    ones = at.attend(q, k, torch.ones(1, 5, 1, dtype=FLOAT), scale=1.0).output[0]
    return Outcome(
        max(gap(at.attend(q, k, v, scale=1.0).output[0], A @ v[0]), gap(ones, torch.ones(4, 1, dtype=FLOAT)))
    )


@statement(
    "N2 Eq. 2, E39",
    "note 2 2",
    printed="A_ij = softmax_i <H_j W_k, H_i W_q>",
    corrected="A_ij = softmax_i <H_j W_q, H_i W_k>/√d: j the query, i the key",
)
def queries_and_keys() -> Outcome:
    H, W_q, W_k = normal(5, 4, seed=1), normal(4, 3, seed=2), normal(4, 3, seed=3)
    attention = scaled_dot_product_attention(H @ W_q, H @ W_k, H)
    h, swapped = gz.Empirical(H @ W_k), gz.Empirical(H @ W_q)
    return Outcome(gap(h.expect(H, H @ W_q / 3**0.5), attention), gap(swapped.expect(H, H @ W_k / 3**0.5), attention))


@statement(
    "N2 Eq. 3, E40",
    "note 2 2",
    printed="P(K|Q) = h e^(<K,Q> - log G), G = log Z",
    corrected="P(K|Q) = h e^(<K,Q> - log Z)",
)
def normaliser_of_the_weights() -> Outcome:
    k, q = normal(5, 3, seed=1), normal(4, 3, seed=2)
    h = gz.Empirical(k)
    G, one = h.log_normalizer(q), torch.ones(4, dtype=FLOAT)
    mass = (q @ k.T - G.unsqueeze(-1)).exp().sum(-1)
    printed = (q @ k.T).exp().sum(-1) / G.abs()
    return Outcome(gap(mass, one), gap(printed, one))
