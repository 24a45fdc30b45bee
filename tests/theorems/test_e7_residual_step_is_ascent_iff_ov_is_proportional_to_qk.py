"""x + W_O W_V sum_j a_ij x_j is a step up log Z iff W_O W_V = tau W_q^T W_k, with fixed keys.   [theory E7]

    ∇_{x_i} (1/beta) log sum_j exp(beta <W_q x_i, W_k x_j>) = W_q^T W_k sum_j a_ij x_j

The paper states it without weights and without freezing the keys. Let the keys move and a column term appears.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("E7",)

sizes = {"seed": seeds, "n": st.integers(2, 6), "d": st.integers(1, 4), "beta": st.sampled_from([0.3, 1.0, 2.0])}


def sublayer(seed, n, d):
    s = Source(seed)
    return s.normal(n, d), s.normal(2, d), s.normal(2, d), s


@given(**sizes)
def test_tied_values_make_the_sublayer_an_ascent_step(seed, n, d, beta):
    X, Wq, Wk, _ = sublayer(seed, n, d)
    B, tau = Wq.mT @ Wk, 0.5
    a = (beta * X @ B @ X.mT).softmax(-1)
    step = X + (a @ X) @ (tau * B).mT  # W_O W_V = tau B
    h = gz.pushforward(gz.Empirical(X), B)
    close(X + tau * h.mean(beta * X), step, scale_of(h, beta * X))
    before, after = h.log_normalizer(beta * X), h.log_normalizer(beta * step)
    assert bool((after >= before + tau * beta * h.mean(beta * X).square().sum(-1) - 1e-9 * (1 + after.abs())).all())


def test_other_values_do_not_follow_the_gradient_and_can_descend():
    X, Wq, Wk, s = sublayer(0, 6, 4)
    B = Wq.mT @ Wk
    h = gz.pushforward(gz.Empirical(X), B)
    gradient, attended = h.mean(X), (X @ B @ X.mT).softmax(-1) @ X
    free = attended @ s.normal(4, 4).mT  # W_O W_V of its own
    assert float(torch.cosine_similarity(free, gradient).max()) < 0.95
    opposed = X - 0.1 * attended @ B.mT  # W_O W_V = -B/10
    assert bool((h.log_normalizer(opposed) < h.log_normalizer(X) - 1e-3).all())


@given(**sizes)
def test_attention_is_the_gradient_of_the_pair_energy_divided_by_the_normalizer(seed, n, d, beta):
    X, _, _, _ = sublayer(seed, n, d)
    X = X / X.norm(dim=-1, keepdim=True)
    gradient = torch.func.grad(lambda x: (beta * x @ x.mT).exp().sum() / (2 * beta))(X)
    h = gz.Empirical(X)
    close(h.mean(beta * X), gradient * (-h.log_normalizer(beta * X)).exp().unsqueeze(-1), n * scale_of(h, beta * X))
