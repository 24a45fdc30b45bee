"""key(eta) ≈ ∇G(eta0) + F (eta - eta0), so that the logits are eta_i^T F eta_j: the Fisher form.   [theory E12, E13]

The paper writes the key as Sigma⁻¹ h_j with Sigma the covariance of the hidden states. That is F only at the moments
of its Theorem 1, where the covariance of the hidden states is the inverse of that of h.
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("E12", "E13")


@given(attentions(min_keys=4, max_dim=3, scales=(1.0,)))
def test_in_general_its_error_is_of_second_order(attention):
    keys, eta0, s = attention
    h, away = gz.Empirical(keys), s.normal(len(eta0))

    def error(t):
        exact = (keys @ (eta0 + t * away)).softmax(-1) @ keys
        return (exact - h.mean(eta0) - t * h.covariance_product(eta0, away)) / t**2

    p = (keys @ eta0).softmax(-1)
    centred = keys - p @ keys
    third = (p * (centred @ away) ** 2) @ centred
    close(error(1e-3), third / 2, scale_of(h, eta0, 3) * (1 + away.norm() ** 3), tolerance=1e-2)


@given(seeds)
def test_one_head_sees_the_form_of_rank_d_only(seed):
    s = Source(seed)
    X, Wq, Wk = s.normal(6, 5), s.normal(2, 5), s.normal(2, 5)
    B = Wq.mT @ Wk / math.sqrt(2)  # columns: q = W_q x; for rows, q = x W, the same matrix is W_q W_k^T / sqrt(d)
    h, queries = gz.Empirical(X @ Wk.mT), X @ Wq.mT / math.sqrt(2)
    close(h.probabilities(queries), (X @ B @ X.mT).softmax(-1), scale_of(h, queries, 0))
    assert int(torch.linalg.matrix_rank(B)) == 2


@given(seeds)
def test_for_layer_normed_tokens_the_form_is_known_modulo_constants(seed):
    s = Source(seed)
    X = torch.nn.functional.layer_norm(s.normal(6, 5), (5,))
    B, one = s.normal(5, 5), torch.ones(5, dtype=X.dtype)
    blurred = B + torch.outer(s.normal(5), one) + torch.outer(one, s.normal(5))
    P = torch.eye(5, dtype=X.dtype) - torch.outer(one, one) / 5
    expected = (X @ B @ X.mT).softmax(-1)
    for form in (blurred, P @ B @ P):
        h = gz.Empirical(X @ form.mT)
        close(h.probabilities(X), expected, scale_of(h, X, 0))
