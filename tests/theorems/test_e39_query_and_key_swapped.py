"""A_ij = exp(<H_j W_q, H_i W_k>/sqrt d) / sum_i' exp(<H_j W_q, H_i' W_k>/sqrt d): j asks, i answers.   [theory E39]

Eq. 2 of the note on filters exchanges W_q and W_k. It writes the columns of A as the laws; here they are rows.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of


def softmax_over_keys(H, Wq, Wk):
    """A[i, j] by the formula, one entry after the other."""
    d, M = Wq.shape[-1], len(H)
    A = torch.empty(M, M, dtype=H.dtype)
    for j in range(M):
        weight = torch.stack([torch.exp((H[j] @ Wq) @ (H[i] @ Wk) / math.sqrt(d)) for i in range(M)])
        A[:, j] = weight / weight.sum()
    return A


@given(seed=seeds, M=st.integers(1, 5), D=st.integers(1, 4), d=st.integers(1, 3))
def test_columns_are_the_laws_of_the_keys_given_their_query(seed, M, D, d):
    s = Source(seed)
    H, Wq, Wk = s.normal(M, D), s.normal(D, d), s.normal(D, d)
    h, queries = gz.Empirical(H @ Wk), H @ Wq / math.sqrt(d)
    A = h.probabilities(queries).mT
    close(A, softmax_over_keys(H, Wq, Wk), scale_of(h, queries, 0))
    close(A.sum(0), torch.ones(M, dtype=torch.float64), M)


def test_with_the_matrices_exchanged_the_weights_are_others():
    s = Source(0)
    H, Wq, Wk = s.normal(5, 4), s.normal(4, 2), s.normal(4, 2)
    A = gz.Empirical(H @ Wk).probabilities(H @ Wq / math.sqrt(2)).mT
    assert float((A - softmax_over_keys(H, Wk, Wq)).abs().max()) > 0.1


@given(seeds)
def test_only_a_symmetric_form_does_not_tell_them_apart(seed):
    s = Source(seed)
    H, W = s.normal(5, 4), s.normal(4, 2)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)  # W_q W_k^T = W diag(1, -1) W^T
    h, queries = gz.Empirical(H @ (W * signs)), H @ W / math.sqrt(2)
    close(h.probabilities(queries).mT, softmax_over_keys(H, W * signs, W), scale_of(h, queries, 0))
