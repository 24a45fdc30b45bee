"""sum_ij exp(beta <x_i, B x_j>) never decreases when all tokens step at once, B >= 0, any tau > 0.   [theory 5.3]

With or without a projection to the sphere. And for fixed keys the log normaliser itself ascends.   [theory 5.1, 5.4]
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Ascent, Empirical, evolve

STATEMENTS = ("5.1", "5.3", "5.4", "5.5")

F64 = torch.float64
seeds, dims = st.integers(0, 10_000), st.integers(1, 5)
steps_, betas = st.floats(0.01, 5.0), st.floats(0.05, 3.0)


def drawn(seed, n, d):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


@given(seed=seeds, d=dims, tau=steps_, beta=betas, form=st.booleans())
def test_on_the_sphere(seed, d, tau, beta, form):
    A = drawn(seed + 1, d, d)
    ascent = Ascent(tau=tau, beta=beta, B=A @ A.mT / d if form else None)
    cloud = torch.nn.functional.normalize(drawn(seed, 12, d), dim=-1)
    found = evolve(cloud, ascent, contraction="sphere", steps=8, observe=["log_pair_energy"])
    energy = found.observed["log_pair_energy"]
    assert bool((energy.diff() >= -1e-12 * (1 + energy[1:].abs())).all())


@given(seed=seeds, d=dims, tau=st.floats(0.01, 1.0), beta=st.floats(0.05, 1.0))
def test_without_a_contraction(seed, d, tau, beta):
    found = evolve(drawn(seed, 12, d), Ascent(tau=tau, beta=beta), steps=4, observe=["log_pair_energy"])
    energy = found.observed["log_pair_energy"]
    assert bool((energy.diff() >= -1e-12 * (1 + energy[1:].abs())).all())


def test_an_asymmetric_form_may_lose_energy():
    """Not a theorem for every B: one that turns the plane does."""
    B = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    cloud = torch.nn.functional.normalize(drawn(3, 12, 2), dim=-1)
    found = evolve(cloud, Ascent(tau=0.5, beta=2.0, B=B), contraction="sphere", steps=40, observe=["log_pair_energy"])
    assert bool((found.observed["log_pair_energy"].diff() < -1e-6).any())


@given(seed=seeds, d=dims, tau=steps_)
def test_frozen_keys_are_ascended(seed, d, tau):
    """G(T x) >= G(x) + tau |∇G|², gradients grow, distances grow."""
    keys, x = drawn(seed, 9, d), drawn(seed + 1, 6, d)
    h = Empirical(keys)
    y = evolve(x, Ascent(tau=tau, keys=keys), steps=1).cloud
    G, grad = h.log_normalizer(x), h.mean(x)
    assert bool((h.log_normalizer(y) >= G + tau * grad.square().sum(-1) - 1e-10 * (1 + G.abs())).all())
    assert bool((h.mean(y).norm(dim=-1) >= grad.norm(dim=-1) - 1e-12).all())
    assert bool((torch.cdist(y, y) >= torch.cdist(x, x) - 1e-7).all())
    assert bool((torch.linalg.slogdet(torch.eye(d, dtype=F64) + tau * h.covariance(x)).logabsdet >= -1e-12).all())


@given(seed=seeds, d=dims, tau=steps_)
def test_frozen_keys_are_ascended_on_the_sphere(seed, d, tau):
    keys, x = drawn(seed, 9, d), torch.nn.functional.normalize(drawn(seed + 1, 6, d), dim=-1)
    y = evolve(x, Ascent(tau=tau, keys=keys), contraction="sphere", steps=1).cloud
    G = Empirical(keys).log_normalizer
    assert bool((G(y) >= G(x) - 1e-12 * (1 + G(x).abs())).all())


@given(seed=seeds, d=dims, beta=betas)
def test_without_a_residual_the_hull_shrinks(seed, d, beta):
    """Tokens stay inside the hull, and the diameter shrinks by Dobrushin's coefficient.   [theory 5.5]"""
    x = drawn(seed, 10, d)
    y = evolve(x, Ascent(tau=1.0, beta=beta, residual=False), steps=1).cloud
    directions = drawn(seed + 1, d, 30)
    assert bool(((y @ directions).amax(0) <= (x @ directions).amax(0) + 1e-12).all())
    weights = (beta * x @ x.mT).softmax(-1)
    shrink = 1 - weights.amin(0).sum()
    assert float(torch.cdist(y, y).max()) <= float(shrink * torch.cdist(x, x).max()) + 1e-7
