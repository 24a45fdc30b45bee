"""Only a symmetric form W_q W_k^T does not tell queries and keys apart.   [theory E39]

Eq. 2 of the note on filters exchanges W_q and W_k. It writes the columns of A as the laws; here they are rows.
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("N2 Eq. 2, E39",)


def softmax_over_keys(H, Wq, Wk):
    """A[i, j] by the formula, one entry after the other."""
    d, M = Wq.shape[-1], len(H)
    A = torch.empty(M, M, dtype=H.dtype)
    for j in range(M):
        weight = torch.stack([torch.exp((H[j] @ Wq) @ (H[i] @ Wk) / math.sqrt(d)) for i in range(M)])
        A[:, j] = weight / weight.sum()
    return A


@given(seeds)
def test_only_a_symmetric_form_does_not_tell_them_apart(seed):
    s = Source(seed)
    H, W = s.normal(5, 4), s.normal(4, 2)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)  # W_q W_k^T = W diag(1, -1) W^T
    h, queries = gz.Empirical(H @ (W * signs)), H @ W / math.sqrt(2)
    close(h.probabilities(queries).mT, softmax_over_keys(H, W * signs, W), scale_of(h, queries, 0))
