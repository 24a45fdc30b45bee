"""Mixture attention gives the gradient of its log normaliser, and softmax attention as its covariances vanish.

On the right: sums over keys written out in float64, derivatives of the log normaliser, torch's softmax attention.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, softplus

from gradlogz import MixtureAttention
from support.scales import close

B, N, E, H, D = 2, 5, 6, 2, 3
KINDS = [(covariance, rank) for covariance in ("head", "token") for rank in (None, 2)]


def case(covariance, rank, raw=0.0):
    torch.manual_seed(1)
    layer = MixtureAttention(E, H, covariance=covariance, rank=rank, dtype=torch.float64)
    with torch.no_grad():
        (layer.variance if covariance == "head" else layer.variance_proj.bias).add_(4.0 + raw)
    return layer, torch.randn(B, N, E, dtype=torch.float64), torch.randn(B, N, E, dtype=torch.float64)


def heads_of(layer, x, y):
    """Queries, keys and covariance matrices of each head, [B, H, ...]."""
    eta = layer.q_proj(x).reshape(B, N, H, D).transpose(1, 2) / D**0.5
    mu = layer.k_proj(y).reshape(B, N, H, D).transpose(1, 2)
    if layer.covariance == "head":
        c = softplus(layer.variance)[None, :, None].expand(B, H, N, -1)
    else:
        c = softplus(layer.variance_proj(y)).reshape(B, N, H, -1).transpose(1, 2)
    U = torch.eye(D, dtype=torch.float64).expand(H, D, D) if layer.directions is None else layer.directions
    return eta, mu, torch.einsum("hdr,bhnr,her->bhnde", U, c, U)


def G_of(eta, mu, Sigma):
    quadratic = torch.einsum("bhmd,bhnde,bhme->bhmn", eta, Sigma, eta)
    return (eta @ mu.mT + quadratic / 2).logsumexp(-1)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_the_output_of_a_head_is_the_gradient_of_its_log_normalizer(covariance, rank):
    layer, x, y = case(covariance, rank)
    eta, mu, Sigma = (t.detach() for t in heads_of(layer, x, y))
    output, heads = layer.attend(x, y)
    close(heads.log_normalizer, G_of(eta, mu, Sigma), 100.0)
    gradient = torch.func.grad(lambda e: G_of(e, mu, Sigma).sum())(eta)
    close(heads.output, gradient, 100.0)
    by_hand = gradient.transpose(1, 2).reshape(B, N, E) @ layer.out_proj.weight.mT + layer.out_proj.bias
    close(output, by_hand, 100.0)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_the_statistics_are_those_of_the_logits(covariance, rank):
    layer, x, y = case(covariance, rank)
    eta, mu, Sigma = heads_of(layer, x, y)
    s = eta @ mu.mT + torch.einsum("bhmd,bhnde,bhme->bhmn", eta, Sigma, eta) / 2
    p, heads = s.softmax(-1), layer.attend(x, y)[1]
    close(heads.entropy, -(p * p.log()).sum(-1), 100.0)
    close(heads.mean_logit, (p * s).sum(-1), 100.0)
    close(heads.max_logit, s.amax(-1), 100.0)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_without_covariances_it_is_softmax_attention(covariance, rank):
    layer, x, y = case(covariance, rank, raw=-torch.inf)
    if covariance == "token":
        with torch.no_grad():
            layer.variance_proj.weight.zero_()
    q, k = (p(t).reshape(B, N, H, D).transpose(1, 2) for p, t in ((layer.q_proj, x), (layer.k_proj, y)))
    expected = scaled_dot_product_attention(q, k, k)
    output, heads = layer.attend(x, y)
    close(heads.output, expected, 100.0)
    close(output, layer.out_proj(expected.transpose(1, 2).reshape(B, N, E)), 100.0)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_the_limit_is_approached_at_first_order(covariance, rank):
    """softplus(raw) = exp(raw) to first order: 10 units of raw are a factor exp(10)."""
    at = [case(covariance, rank, raw)[0] for raw in (-10.0, -20.0, -torch.inf)]
    _, x, y = case(covariance, rank)
    for layer in at:
        if covariance == "token":
            with torch.no_grad():
                layer.variance_proj.weight.zero_()
    far, near, limit = (layer(x, y).detach() for layer in at)
    assert abs(float((near - limit).norm() / (far - limit).norm()) * torch.e**10 - 1) < 1e-3


def test_covariances_that_keys_share_change_no_weight():
    layer, x, y = case("head", None)
    shared = layer.attend(x, y)[1]
    other = case("head", None, raw=2.0)[0].attend(x, y)[1]
    close(shared.entropy, other.entropy, 10.0)
    assert float((shared.output - other.output).detach().norm()) > 0.1


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_masks_leave_keys_out_and_a_row_may_be_empty(covariance, rank):
    layer, x, y = case(covariance, rank)
    mask = torch.tensor([True, False, True, True, False])
    close(layer(x, y, attn_mask=mask), layer(x, y[:, mask]), 100.0)
    empty, heads = layer.attend(x, y, attn_mask=torch.zeros(N, N, dtype=torch.bool))
    close(empty, layer.out_proj.bias.expand(B, N, E), 1.0)
    assert bool((heads.mean_logit == 0).all())
    assert bool((heads.log_normalizer == -torch.inf).all())
    assert all(
        bool(g.isfinite().all())
        for g in torch.autograd.grad(empty.sum(), list(layer.parameters()), allow_unused=True)
        if g is not None
    )
    close(layer(x[0], y[0]), layer(x, y)[0], 100.0)
