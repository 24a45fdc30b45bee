"""Attention layers as gradients of log normalisers, written out.   [paper 1, 5, 6; theory 3.9, 6.1, 6.2, 6.7, 8.4; E57]

    q = W_q x, k = W_k y, split into heads of size d;   G = log Σ_n exp(<q,k_n>/√d + ...)

Every layer gets random weights. Gradients and Hessians are those of plain torch.

Read next: ../attention/layers (the layers), measure_operations.py (the same relations between measures).
"""

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from .. import attention
from .._typing import Tensor
from ..attention.layers.gated import GatedHeads
from ..attention.layers.link import LinkAttention
from ..attention.layers.mixture import MixtureAttention
from ..attention.layers.moment import MomentAttention
from ..attention.layers.multihead import MultiheadAttention
from ..measures import Gaussian
from .definition import FLOAT, normal, number, spread
from .statement import Outcome, gap, statement

SIZE, HEADS = 4, 2  # tokens of size 4, two heads of size 2
ROOT = 2**0.5  # √d


Layer = TypeVar("Layer", bound=nn.Module)


def _drawn(layer: Layer) -> Layer:
    """The layer with random weights."""
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=40 + i))
    return layer


def _tokens() -> tuple[Tensor, Tensor]:
    """Three tokens that attend to five others."""
    return normal(3, SIZE, seed=1), normal(5, SIZE, seed=2)


def _split(tokens: Tensor) -> Tensor:
    """Heads of projected tokens, [heads, n, 2]."""
    return tokens.reshape(-1, HEADS, SIZE // HEADS).transpose(0, 1)


@statement(
    "3.9 layer",
    "theory",
    corrected="multi-head attention: W_o concat_h softmax(q_h k_h^T/√d) v_h + b_o, G_h = log Σ_n e^(q_h k_hn/√d)",
)
def multihead_attention() -> Outcome:
    x, y = _tokens()
    layer = _drawn(MultiheadAttention(SIZE, HEADS, batch_first=True, dtype=FLOAT))
    weights, bias = layer.in_proj_weight.detach().chunk(3), layer.in_proj_bias.detach().chunk(3)
    q, k, v = (_split(t @ W.T + b) for t, W, b in zip((x, y, y), weights, bias, strict=True))
    scores = (q @ k.mT / ROOT).exp()
    attended = scores @ v / scores.sum(-1, keepdim=True)
    expected = layer.out_proj(attended.transpose(0, 1).reshape(3, SIZE))
    output, heads = layer.attend(x.unsqueeze(0), y.unsqueeze(0), y.unsqueeze(0))
    return Outcome(max(gap(output[0], expected, 10.0), gap(heads.log_normalizer[0], scores.sum(-1).log(), 10.0)))


@statement(
    "6.2 layer",
    "paper 5",
    corrected="gated heads: the output is √d ∇G, G = log Σ_h π_h Σ_n e^(<W_qh x, W_kh y_n>/√d); gap KL(π‖r)",
)
def gated_heads() -> Outcome:
    x, y = _tokens()
    layer = _drawn(GatedHeads(SIZE, HEADS, tied=True, bias=False, dtype=FLOAT))
    W_q, W_k, log_pi = layer.q_proj.weight.detach(), layer.k_proj.weight.detach(), layer.log_weights.detach()
    log_pi = log_pi.log_softmax(0)

    def of_heads(x: Tensor) -> Tensor:
        return (_split(x @ W_q.T) @ _split(y @ W_k.T).mT / ROOT).exp().sum(-1).log()

    def log_normalizer(x: Tensor) -> Tensor:
        return (log_pi.unsqueeze(-1) + of_heads(x)).exp().sum(0).log()

    output, gated = layer.attend(x, y)
    gates = torch.softmax(log_pi.unsqueeze(-1) + of_heads(x), 0)
    gradient = torch.func.grad(lambda t: log_normalizer(t).sum())(x)
    kl = (log_pi.exp().unsqueeze(-1) * (log_pi.unsqueeze(-1) - gates.log())).sum(0)
    return Outcome(
        max(
            gap(output, ROOT * gradient, 10.0),
            gap(gated.log_normalizer, log_normalizer(x), 10.0),
            gap(gated.gates, gates),
            gap(gated.gap, kl, 10.0),
        )
    )


def _gaussian_keys(mean: Tensor, covariance: Tensor) -> Callable[[Tensor], Tensor]:
    """G(η) = log Σ_n exp(<k_n,η> + <η,Σ_n η>/2) of one head."""

    def log_normalizer(eta: Tensor) -> Tensor:
        return (mean @ eta + torch.einsum("d,nde,e->n", eta, covariance, eta) / 2).exp().sum().log()

    return log_normalizer


@statement(
    "6.1 layer",
    "paper 6",
    corrected="keys as Gaussians N(k_n, diag softplus(W_c y_n)): each head returns ∇G of their mixture at W_q x/√d",
)
def mixture_attention() -> Outcome:
    x, y = 0.5 * normal(3, SIZE, seed=1), normal(5, SIZE, seed=2)
    layer = _drawn(MixtureAttention(SIZE, HEADS, dtype=FLOAT))
    q, k = (_split(projection(t).detach()) for projection, t in ((layer.q_proj, x), (layer.k_proj, y)))
    variances = _split(nn.functional.softplus(layer.variance_proj(y)).detach())
    output, heads = layer.attend(x, y)
    gradients = torch.empty(HEADS, 3, 2, dtype=FLOAT)
    for h in range(HEADS):
        G = _gaussian_keys(k[h], torch.diag_embed(variances[h]))
        for i in range(3):
            gradients[h, i] = torch.func.grad(G)(q[h, i] / ROOT)
    joined = layer.out_proj(gradients.transpose(0, 1).reshape(3, SIZE))
    scale = 1 + float(gradients.abs().max())
    return Outcome(max(gap(heads.output, gradients, 10.0 * scale), gap(output, joined, 10.0 * scale)))


@statement(
    "8.4 layer",
    "note 2 4",
    corrected="tokens N(μ_n,Σ_n): the output has mean Σ_h W_oh ∇G_h and covariance Σ_h W_oh ∇²G_h W_oh^T",
)
def moment_attention() -> Outcome:
    x, y = 0.5 * normal(3, SIZE, seed=1), normal(5, SIZE, seed=2)
    Sigma = torch.stack([0.3 * spread(SIZE, seed=s) for s in range(5)])
    layer = _drawn(MomentAttention(SIZE, HEADS, covariance="full", noise=False, bias=False, dtype=FLOAT))
    W_q, W_k, W_o = (projection.weight.detach() for projection in (layer.q_proj, layer.k_proj, layer.out_proj))
    actual = layer(x, torch.zeros(3, SIZE, SIZE, dtype=FLOAT), (y, Sigma))
    worst = 0.0
    for i in range(3):
        mean, covariance = torch.zeros(SIZE, dtype=FLOAT), torch.zeros(SIZE, SIZE, dtype=FLOAT)
        for part in (slice(0, 2), slice(2, 4)):
            G = _gaussian_keys(y @ W_k[part].T, W_k[part] @ Sigma @ W_k[part].T)
            eta = W_q[part] @ x[i] / ROOT
            mean = mean + W_o[:, part] @ torch.func.grad(G)(eta)
            covariance = covariance + W_o[:, part] @ torch.func.hessian(G)(eta) @ W_o[:, part].T
        scale = 1 + float(covariance.abs().max())
        worst = max(worst, gap(actual.mean[i], mean, 10.0 * scale), gap(actual.covariance[i], covariance, 10.0 * scale))
    return Outcome(worst)


@statement(
    "E57 layer",
    "paper 6",
    corrected="link(∇G(η)) = η: log (Poisson), 1 - 1/u (Gamma), artanh (spins), centred log (one-hot), radial (sphere)",
)
def links_of_families() -> Outcome:
    eta = 0.5 * normal(4, 3, seed=1).clamp(-1.8, 1.8)
    length = eta.norm(dim=-1, keepdim=True)
    means = {
        "gaussian": eta,
        "poisson": eta.exp(),
        "gamma": 1 / (1 - eta),
        "spins": (eta.exp() - (-eta).exp()) / (eta.exp() + (-eta).exp()),
        "one_hot": eta.exp() / eta.exp().sum(-1, keepdim=True),
        "sphere": (1 / torch.tanh(length) - 1 / length) * eta / length,
    }
    worst = 0.0
    for family, u in means.items():
        layer = LinkAttention(3, 1, family=family, project=False, margin=1e-12, dtype=FLOAT)  # type: ignore[arg-type]
        expected = eta - eta.mean(-1, keepdim=True) if family == "one_hot" else eta
        worst = max(worst, gap(layer.link(u), expected, 10.0))
    layer, tokens = _drawn(LinkAttention(3, 1, family="poisson", project=False, dtype=FLOAT)), eta.exp()
    logits = (eta @ tokens.T / number(3.0).sqrt()).exp()
    values = layer.v_proj(tokens).detach()
    attended = layer.out_proj(logits @ values / logits.sum(-1, keepdim=True))
    return Outcome(max(worst, gap(layer(tokens), attended, 10.0)))


# Alternatives to softmax ----------------------------------------------------------------------------------------------


@statement(
    "6.7 linear",
    "paper 1",
    corrected="linear attention with v = k: c Σ<q,k_n>k_n is ∇G of N(0, c Σ k_n k_n^T), G = c Σ<q,k_n>²/2",
)
def linear_attention() -> Outcome:
    q, k, c = normal(3, 2, seed=1), normal(5, 2, seed=2), 0.7

    def log_normalizer(q: Tensor) -> Tensor:
        return c * (q @ k.T).square().sum(-1) / 2

    gradient = torch.func.grad(lambda t: log_normalizer(t).sum())(q)
    output, G, _ = attention.linear_attend(q, k, k, feature_map="identity", scale=c)
    assert G is not None
    gaussian = Gaussian(torch.zeros(2, dtype=FLOAT), c * k.T @ k)
    return Outcome(
        max(
            gap(output, gradient, 10.0),
            gap(G, log_normalizer(q), 10.0),
            gap(gaussian.mean(q), gradient, 10.0),
            gap(gaussian.log_normalizer(q), log_normalizer(q), 10.0),
        )
    )


@statement(
    "6.7 sigmoid",
    "paper 1",
    corrected="sigmoid attention attends to sums of subsets S of keys: G = log Σ_S e^(Σ_S s_n) = Σ log(1+e^s_n)",
)
def sigmoid_attention() -> Outcome:
    q, k, b = normal(3, 2, seed=1), normal(5, 2, seed=2), -0.4
    subsets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=5)), dtype=FLOAT)
    weights = ((q @ k.T + b) @ subsets.T).exp()
    output, G, H, *_ = attention.sigmoid_attend(q, k, k, scale=1.0, offset=b)
    assert G is not None
    assert H is not None
    probabilities = weights / weights.sum(-1, keepdim=True)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    return Outcome(
        max(
            gap(output, probabilities @ subsets @ k, 10.0),
            gap(G, weights.sum(-1).log(), 10.0),
            gap(H, entropy, 10.0),
        )
    )
