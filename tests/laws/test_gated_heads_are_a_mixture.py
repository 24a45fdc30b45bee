"""Gated heads are the exact mixture of the heads; with constant gates they are torch's multi-head attention.

[theory 6.2] On the right: one softmax over all pairs of head and key, derivatives, torch.nn.MultiheadAttention.
"""

import pytest
import torch
from torch import nn

import gradlogz as gz
from gradlogz.attention.layers.gated import coherence
from support.scales import close

B, N, E, H, D = 2, 5, 6, 3, 2


def case(**options):
    torch.manual_seed(1)
    layer = gz.GatedHeads(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.log_weights.copy_(torch.randn(H))
    return layer, torch.randn(B, N, E, dtype=torch.float64), torch.randn(B, N, E, dtype=torch.float64)


def logits_of(layer, x, y):
    q, k = (p(t).reshape(B, N, H, D).transpose(1, 2) for p, t in ((layer.q_proj, x), (layer.k_proj, y)))
    return q @ k.mT / D**0.5, k


@pytest.mark.parametrize("tied", [True, False])
def test_gates_and_weights_are_one_softmax_over_pairs_of_head_and_key(tied):
    layer, x, y = case(tied=tied)
    s, k = logits_of(layer, x, y)
    pairs = (s + layer.log_weights.log_softmax(0)[:, None, None]).transpose(1, 2)  # [B, N, H, N]
    p = pairs.flatten(-2).softmax(-1).reshape(pairs.shape).transpose(1, 2)
    output, gated = layer.attend(x, y)
    close(gated.gates, p.sum(-1), 100.0)
    close(gated.log_normalizer, pairs.flatten(-2).logsumexp(-1), 100.0)
    values = k if tied else layer.v_proj(y).reshape(B, N, H, D).transpose(1, 2)
    heard = (p @ values).transpose(1, 2).reshape(B, N, E)
    close(output, heard @ layer.q_proj.weight if tied else layer.out_proj(H * heard), 100.0)


def test_tied_it_is_the_gradient_of_the_log_normalizer():
    layer, x, y = case(tied=True)

    def G(x):
        s = logits_of(layer, x, y)[0] + layer.log_weights.log_softmax(0)[:, None, None]
        return s.transpose(1, 2).flatten(-2).logsumexp(-1).sum()

    close(layer(x, y), D**0.5 * torch.func.grad(G)(x), 100.0)


def test_tied_it_is_the_mean_of_a_mixture_of_empirical_measures():
    layer, x, y = case(tied=True, bias=False)
    W_q, k = layer.q_proj.weight.reshape(H, D, E), logits_of(layer, x, y)[1]
    seen = torch.einsum("hde,bhnd->bhne", W_q, k) / D**0.5  # the keys as the query token sees them
    h = gz.Mixture(layer.log_weights.log_softmax(0).expand(B, H), gz.Empirical(seen))
    output, gated = layer.attend(x, y)
    close(output, D**0.5 * h.mean(x), 100.0)
    close(gated.log_normalizer, h.log_normalizer(x), 100.0)
    close(gated.gates.mT, h.responsibilities(x), 100.0)
    close(gated.gap, h.lower_bound(x).gap, 100.0)


@pytest.mark.parametrize("bias", [True, False])
def test_with_constant_gates_it_is_multi_head_attention(bias):
    layer, x, y = case(bias=bias)
    theirs = nn.MultiheadAttention(E, H, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        theirs.out_proj.load_state_dict(layer.out_proj.state_dict())
    uniform = torch.full((H,), 1 / H, dtype=torch.float64)
    expected = theirs(x, y, y)[0]
    close(layer(x, y, gates=uniform), expected, 100.0)
    close(layer(x, y, gates=uniform[:, None].expand(B, H, N)), expected, 100.0)
    assert float((layer(x, y) - expected).detach().norm()) > 0.1


def test_tied_with_constant_gates_it_is_the_gradient_of_the_jensen_bound():
    layer, x, y = case(tied=True)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def bound(x):
        return (q[:, None] * logits_of(layer, x, y)[0].logsumexp(-1)).sum()

    close(layer(x, y, gates=q), D**0.5 * torch.func.grad(bound)(x), 100.0)


def test_the_gap_is_what_the_bound_loses():
    layer, x, y = case()
    G = logits_of(layer, x, y)[0].logsumexp(-1)
    log_pi, q = layer.log_weights.log_softmax(0), torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    whole = (G + log_pi[:, None]).logsumexp(1)
    for gates in (q, log_pi.exp()):
        lost = whole - sum(p * (G[:, k] + log_pi[k] - p.log()) for k, p in enumerate(gates) if p > 0)
        close(coherence(G, log_pi, gates), lost, 100.0)
    gap = layer.attend(x, y)[1].gap
    close(gap, coherence(G, log_pi, log_pi.exp()), 100.0)
    assert bool((gap > 0).all())
    close(coherence(torch.zeros(B, H, N, dtype=torch.float64)), torch.zeros(B, N, dtype=torch.float64), 1.0)


def test_the_coherence_of_ordinary_heads_can_be_read():
    layer, x = gz.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64), case()[1]
    G = layer.attend(x, x, x)[1].log_normalizer
    log_r = G.log_softmax(1)
    close(coherence(G), -(log_r.mean(1) + torch.tensor(float(H)).double().log()), 10.0)


@pytest.mark.parametrize("tied", [True, False])
def test_masks_leave_keys_out_and_a_row_may_be_empty(tied):
    layer, x, y = case(tied=tied)
    mask = torch.tensor([True, False, True, True, False])
    close(layer(x, y, attn_mask=mask), layer(x, y[:, mask]), 100.0)
    empty, gated = layer.attend(x, y, attn_mask=torch.zeros(N, N, dtype=torch.bool))
    nothing = torch.zeros(E, dtype=torch.float64) if tied else layer.out_proj.bias
    close(empty, nothing.expand(B, N, E), 1.0)
    assert bool((gated.gap == 0).all())
    total = empty.sum() + gated.gap.sum()
    assert all(
        bool(g.isfinite().all())
        for g in torch.autograd.grad(total, list(layer.parameters()), allow_unused=True)
        if g is not None
    )
    close(layer(x[0], y[0]), layer(x, y)[0], 100.0)
