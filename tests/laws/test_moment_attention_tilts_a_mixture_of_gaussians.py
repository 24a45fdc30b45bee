"""Moment attention is Gaussian-message attention: moments of a tilted mixture, mapped by W_o.   [theory 8.3, 8.4]

On the right: sums over tokens written out in float64, derivatives of the log normaliser, torch's softmax attention.
"""

import pytest
import torch
from torch import nn

from gradlogz import MomentAttention, MultiheadAttention
from support.scales import close

B, N, E, H, D = 2, 5, 6, 2, 3


def case(covariance="diagonal", **options):
    torch.manual_seed(1)
    layer = MomentAttention(E, H, covariance=covariance, dtype=torch.float64, **options)
    mean = torch.randn(B, N, E, dtype=torch.float64)
    a = torch.randn(B, N, E, E, dtype=torch.float64)
    return layer, mean, a @ a.mT / E if covariance == "full" else a[..., 0].square()


def by_definition(layer, mean, Sigma, visible=None):
    """The formulas of the module's docstring, query by query, head by head, token by token; Sigma are matrices."""
    W_q, W_k = (p.weight.reshape(H, D, E) for p in (layer.q_proj, layer.k_proj))
    b_q, b_k = (p.bias.reshape(H, D) for p in (layer.q_proj, layer.k_proj))
    W_o = layer.out_proj.weight.reshape(E, H, D)
    Q = torch.zeros(E, E, dtype=torch.float64) if layer.noise is None else nn.functional.softplus(layer.noise).diag()
    means, covariances, G = torch.zeros(B, N, E), torch.zeros(B, N, E, E), torch.zeros(B, H, N)
    means, covariances, G = means.double(), covariances.double(), G.double()
    for b in range(B):
        for m in range(N):
            seen = [n for n in range(N) if visible is None or visible[m, n]]
            means[b, m], covariances[b, m] = layer.out_proj.bias, Q
            for h in range(H):
                eta = (W_q[h] @ mean[b, m] + b_q[h]) / D**0.5
                mu = [W_k[h] @ mean[b, n] + b_k[h] for n in seen]
                S = [W_k[h] @ Sigma[b, n] @ W_k[h].mT for n in seen]
                if layer.covariance == "diagonal":
                    S = [s.diagonal().diag() for s in S]
                logits = torch.stack([x @ eta + eta @ s @ eta / 2 for x, s in zip(mu, S, strict=True)])
                r = logits.softmax(0)
                tilted = [x + s @ eta for x, s in zip(mu, S, strict=True)]
                centre = sum(w * t for w, t in zip(r, tilted, strict=True))
                spread = sum(
                    w * (s + torch.outer(t - centre, t - centre)) for w, s, t in zip(r, S, tilted, strict=True)
                )
                if layer.covariance == "diagonal":
                    spread = spread.diagonal().diag()
                G[b, h, m] = logits.logsumexp(0)
                means[b, m] = means[b, m] + W_o[:, h] @ centre
                covariances[b, m] = covariances[b, m] + W_o[:, h] @ spread @ W_o[:, h].mT
    return means, covariances, G


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_it_is_the_definition(covariance, causal):
    layer, mean, Sigma = case(covariance)
    found, heads = layer.attend(mean, Sigma, is_causal=causal)
    matrices = torch.diag_embed(Sigma) if covariance == "diagonal" else Sigma
    means, covariances, G = by_definition(layer, mean, matrices, torch.ones(N, N).tril() if causal else None)
    close(found.mean, means.detach(), 100.0)
    expected = covariances if covariance == "full" else covariances.diagonal(dim1=-2, dim2=-1)
    close(found.covariance, expected.detach(), 100.0)
    close(heads.log_normalizer, G.detach(), 100.0)


def test_diagonal_and_full_agree_where_nothing_is_correlated():
    """With W_k that keeps coordinates apart, a diagonal covariance stays one in the heads."""
    diagonal, mean, variance = case("diagonal")
    full, _, _ = case("full")
    with torch.no_grad():
        diagonal.k_proj.weight.copy_(torch.diag(torch.randn(E, dtype=torch.float64)))
        diagonal.out_proj.weight.copy_(torch.eye(E))
    full.load_state_dict(diagonal.state_dict())
    one, other = diagonal(mean, variance), full(mean, torch.diag_embed(variance))
    close(one.mean, other.mean, 100.0)
    close(one.covariance, other.covariance.diagonal(dim1=-2, dim2=-1), 100.0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_mean_and_covariance_are_derivatives_of_the_log_normalizer(covariance):
    """In eta, reached through the bias of W_q: ∇G is the output of a head, ∇²G its covariance."""
    layer, mean, Sigma = case(covariance, noise=False)
    one = mean[:1, :1], Sigma[:1, :1]

    def G(shift):
        given = {"q_proj.bias": layer.q_proj.bias + D**0.5 * shift}
        return torch.func.functional_call(
            _Attend(layer), {f"layer.{k}": v for k, v in given.items()}, (*one, (mean[:1], Sigma[:1]))
        )

    zero = torch.zeros(E, dtype=torch.float64)
    heads = layer.attend(*one, (mean[:1], Sigma[:1]))[1]
    close(heads.output.flatten(), torch.func.grad(G)(zero), 100.0)
    hessian = torch.func.hessian(G)(zero)
    close(heads.value_variance.flatten(), hessian.diagonal(), 100.0)
    close(hessian[:D, D:], torch.zeros(D, D, dtype=torch.float64), 100.0)  # heads are independent


class _Attend(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, mean, covariance, memory):
        return self.layer.attend(mean, covariance, memory)[1].log_normalizer.sum()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_without_uncertainty_it_is_softmax_attention_and_the_covariance_that_it_drops(covariance):
    layer, mean, Sigma = case(covariance, noise=False)
    ordinary = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    with torch.no_grad():  # values are keys
        ordinary.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.k_proj)]))
        ordinary.in_proj_bias.copy_(torch.cat([p.bias for p in (layer.q_proj, layer.k_proj, layer.k_proj)]))
        ordinary.out_proj.load_state_dict(layer.out_proj.state_dict())
    found = layer(mean, torch.zeros_like(Sigma))
    expected = nn.MultiheadAttention.forward(ordinary, mean, mean, mean)[0]
    close(found.mean, expected, 100.0)

    p = ordinary(mean, mean, mean, average_attn_weights=False)[1]
    k = layer.k_proj(mean).reshape(B, N, H, D).transpose(1, 2)
    away = k.unsqueeze(2) - (p @ k).unsqueeze(3)
    dropped = torch.einsum("bhmn,bhmnd,bhmne->bhmde", p, away, away)
    if covariance == "diagonal":
        dropped = dropped.diagonal(dim1=-2, dim2=-1).diag_embed()
    W_o = layer.out_proj.weight.reshape(E, H, D)
    whole = torch.einsum("ehd,bhmdg,fhg->bmef", W_o, dropped, W_o)
    close(found.covariance, whole if covariance == "full" else whole.diagonal(dim1=-2, dim2=-1), 100.0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_limit_is_approached_at_first_order(covariance):
    layer, mean, Sigma = case(covariance, noise=False)
    limit = layer(mean, 0 * Sigma)
    far, near = (layer(mean, t * Sigma) for t in (1e-4, 1e-6))
    for at_far, at_near, there in zip(far, near, limit, strict=True):
        ratio = (at_near - there).norm() / (at_far - there).norm()
        assert abs(float(ratio.detach()) - 1e-2) < 1e-4


def test_layers_stack_and_noise_adds():
    layer, mean, variance = case()
    quiet, _, _ = case(noise=False)
    quiet.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "noise"})
    close(
        layer(mean, variance).covariance - quiet(mean, variance).covariance,
        nn.functional.softplus(layer.noise).expand(B, N, E),
        100.0,
    )
    moments = (mean, variance)
    for _ in range(3):
        moments = layer(*moments)
    assert bool((moments.covariance > 0).all())


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_masks_leave_tokens_out_and_a_row_may_be_empty(covariance):
    layer, mean, Sigma = case(covariance)
    mask = torch.tensor([True, True, False, True, False])
    found = layer(mean, Sigma, attn_mask=mask)
    expected = layer(mean, Sigma, (mean[:, mask], Sigma[:, mask]))
    for actual, of_few in zip(found, expected, strict=True):
        close(actual, of_few, 100.0)
    weights = torch.randn(N, dtype=torch.float64)  # log weights of the tokens
    heavier = layer(mean, Sigma, attn_mask=weights + 3.0)
    for actual, same in zip(heavier, layer(mean, Sigma, attn_mask=weights), strict=True):
        close(actual, same, 100.0)
    nothing = layer(mean, Sigma, attn_mask=torch.zeros(N, N, dtype=torch.bool))
    close(nothing.mean, layer.out_proj.bias.expand(B, N, E), 1.0)
    Q = nn.functional.softplus(layer.noise)
    close(nothing.covariance, (Q.diag() if covariance == "full" else Q).expand_as(Sigma), 1.0)
    gradients = torch.autograd.grad(
        nothing.mean.sum() + nothing.covariance.sum(), list(layer.parameters()), allow_unused=True
    )
    assert all(g is None or bool(g.isfinite().all()) for g in gradients)


def test_no_batch_is_a_batch_of_one():
    for covariance in ("diagonal", "full"):
        layer, mean, Sigma = case(covariance)
        for alone, of_many in zip(layer(mean[0], Sigma[0]), layer(mean, Sigma), strict=True):
            close(alone, of_many[0], 100.0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_variances_keep_their_digits_in_half_precision(covariance):
    """A variance is a difference of squares: with keys far from 0 half precision would leave nothing of it."""
    layer, mean, Sigma = case(covariance)
    layer, mean, Sigma = layer.bfloat16(), (mean + 8.0).bfloat16(), (Sigma / 100).bfloat16()
    found = layer(mean, Sigma)
    exact = layer.double()(mean.double(), Sigma.double())
    assert found.covariance.dtype == torch.bfloat16
    torch.testing.assert_close(found.covariance.double(), exact.covariance, rtol=0.2, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.float()(mean.float(), Sigma.float())
    assert found.covariance.dtype == torch.float32
    torch.testing.assert_close(found.covariance.double(), exact.covariance, rtol=0.2, atol=0.05)
