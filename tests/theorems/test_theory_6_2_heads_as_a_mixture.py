"""Heads as a mixture are gated by their log Z; ordinary multi-head attention is the gradient of a Jensen bound.

[theory 6.2] Head k sees the keys W_qk^T W_kk x_j, G_k(eta) = log sum_j exp(eta^T W_qk^T W_kk x_j). The paper calls
multi-head attention incoherent (section 5); the cost is KL(q‖softmax(log pi + log Z_k)), per token.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

sizes = {"seed": seeds, "heads": st.integers(1, 4), "n": st.integers(1, 5)}


def layer(seed, heads, n, D=4, d=2):
    s = Source(seed)
    X, Wq, Wk = s.normal(n, D), s.normal(heads, d, D), s.normal(heads, d, D)
    B = Wq.mT @ Wk
    seen = torch.einsum("kde,ne->knd", B, X)
    log_pi, eta = s.log_simplex(heads), s.normal(D)
    return gz.Mixture(log_pi, gz.Empirical(seen)), log_pi, seen, X, B, eta, s


@given(**sizes)
def test_the_exact_mixture_is_one_softmax_over_all_pairs_of_head_and_key(seed, heads, n):
    h, log_pi, seen, _, _, eta, _ = layer(seed, heads, n)
    logits = log_pi.unsqueeze(-1) + seen @ eta
    p = logits.flatten().softmax(-1)
    close(h.log_normalizer(eta), logits.flatten().logsumexp(-1), scale_of(h, eta, 0))
    close(h.mean(eta), p @ seen.flatten(0, 1), scale_of(h, eta))
    close(h.responsibilities(eta), p.reshape(heads, n).sum(-1), scale_of(h, eta, 0))


@given(**sizes)
def test_fixed_gates_give_ordinary_multi_head_attention(seed, heads, n):
    h, log_pi, seen, X, B, eta, s = layer(seed, heads, n)
    log_q = s.log_simplex(heads)
    # W_O W_V of head k is q_k W_qk^T W_kk.
    out = sum(q * B[k] @ ((X @ B[k].mT @ eta).softmax(-1) @ X) for k, q in enumerate(log_q.exp()))
    bound = h.lower_bound(eta, log_q)
    scale = scale_of(h, eta, 0) + seen.abs().max() * eta.norm() * 4
    close(bound.mean, out, scale * (1 + seen.norm(dim=-1).max()))
    gradient = torch.func.grad(lambda e: log_q.exp() @ (seen @ e).logsumexp(-1))(eta)
    close(bound.mean, gradient, scale * (1 + seen.norm(dim=-1).max()))
    log_r = (log_pi + (seen @ eta).logsumexp(-1)).log_softmax(-1)
    close(bound.gap, log_q.exp() @ (log_q - log_r), scale)
    assert float(bound.value) <= float(h.log_normalizer(eta) + 1e-12 * scale)


def test_the_gated_and_the_ordinary_output_differ():
    h, *_, eta, _ = layer(0, 4, 5)
    bound = h.lower_bound(eta)
    assert float(bound.gap) > 0.05
    assert float((bound.mean - h.mean(eta)).norm()) > 0.1


@given(seeds)
def test_heads_of_equal_log_normalizer_cost_nothing(seed):
    # Heads that are rotations of one set of keys seen from eta: equal G_k, so r = pi.
    s = Source(seed)
    keys, eta = s.normal(5, 3), s.normal(3)
    axis = eta / eta.norm()
    mirror = torch.eye(3, dtype=torch.float64) - 2 * torch.outer(*(2 * [_across(s.normal(3), axis)]))
    h = gz.Mixture(s.log_simplex(2), gz.Empirical(torch.stack((keys, keys @ mirror))))
    close(h.lower_bound(eta).gap, torch.zeros((), dtype=torch.float64), scale_of(h, eta, 0))
    close(h.lower_bound(eta).mean, h.mean(eta), scale_of(h, eta))


def _across(v, axis):
    v = v - (v @ axis) * axis
    return v / v.norm()
