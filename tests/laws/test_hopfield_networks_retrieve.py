"""Hopfield networks: energy, retrieval, its bound, and the mixture of Gaussians behind them.   [theory 5.6, 5.7]"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import retrieve
from gradlogz.dynamics import HopfieldRetrieval, capacity_constant, hopfield_energy, pattern_separation, retrieval_bound
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@given(seed=st.integers(0, 10_000), beta=st.floats(0.1, 8.0), s=st.floats(0.05, 1.95))
def test_an_update_lowers_the_energy_by_what_is_promised(seed, beta, s):
    patterns, x = drawn(seed, 7, 4), drawn(seed + 1, 5, 4)
    att = (beta * x @ patterns.mT).softmax(-1) @ patterns
    found = retrieve(x, patterns, beta=beta, damping=s, max_iterations=1, throw=False).state
    close(found, x + s * (att - x), scale=10.0)
    before, after = hopfield_energy(x, patterns, beta=beta), hopfield_energy(found, patterns, beta=beta)
    promised = s * (1 - s / 2) * (x - att).square().sum(-1)
    assert bool((after <= before - promised + 1e-10 * (1 + before.abs())).all())
    assert bool((before >= -1e-12).all())


def test_the_energy_is_that_of_a_mixture_of_gaussians():
    """exp(-beta E) = sum_n exp(beta |x_n|²/2) exp(-beta |x - x_n|²/2), up to a constant; attention is its score."""
    beta, patterns, x = 1.7, drawn(0, 6, 3), drawn(1, 9, 3)
    log_p = torch.logsumexp(beta * patterns.square().sum(-1) / 2 - beta * torch.cdist(x, patterns).square() / 2, -1)
    energy = hopfield_energy(x, patterns, beta=beta)
    constant = -beta * energy - log_p
    close(constant, constant[:1].expand_as(constant), scale=100.0)
    # The score of that law, by Tweedie: beta (att(x) - x).
    point = x.clone().requires_grad_()
    (score,) = torch.autograd.grad(-beta * hopfield_energy(point, patterns, beta=beta).sum(), point)
    close(score, beta * ((beta * x @ patterns.mT).softmax(-1) @ patterns - x), scale=10.0)


def test_patterns_far_apart_are_retrieved():
    patterns = torch.nn.functional.normalize(drawn(0, 30, 50), dim=-1)
    noisy = patterns + 0.02 * drawn(1, 30, 50)
    found = retrieve(noisy, patterns, beta=60.0)
    assert bool(found.converged.all())
    assert float((found.state - patterns).norm(dim=-1).max()) < 1e-6


@pytest.mark.parametrize("beta", [1.0, 5.0, 20.0])
def test_one_update_stays_within_the_bound(beta):
    patterns = torch.nn.functional.normalize(drawn(2, 12, 10), dim=-1)
    error = ((beta * patterns @ patterns.mT).softmax(-1) @ patterns - patterns).norm(dim=-1)
    assert bool((error <= retrieval_bound(patterns, beta=beta) * (1 + 1e-12)).all())
    by_hand = [min(float(p @ (p - q)) for j, q in enumerate(patterns) if j != i) for i, p in enumerate(patterns)]
    close(pattern_separation(patterns), torch.tensor(by_hand, dtype=F64))


def test_warm_patterns_have_one_fixed_point():
    """A contraction where beta diam² < 4: every start ends in one state, and nothing is retrieved.   [theory 5.7]"""
    patterns = 0.3 * torch.nn.functional.normalize(drawn(3, 8, 5), dim=-1)
    beta = 3.9 / float(torch.cdist(patterns, patterns).max()) ** 2
    ends = retrieve(5 * drawn(4, 20, 5), patterns, beta=beta, max_iterations=2000, tolerance=1e-12).state
    close(ends, ends[:1].expand_as(ends), tolerance=1e-9)


def test_a_state_does_not_depend_on_its_neighbours():
    patterns, x = drawn(5, 9, 4), drawn(6, 6, 4)
    together = retrieve(x, patterns, beta=0.8, max_iterations=500)
    for i in range(6):
        alone = retrieve(x[i : i + 1], patterns, beta=0.8, max_iterations=500)
        close(together.state[i], alone.state[0])
        assert int(together.steps[i]) == int(alone.steps[0])


def test_the_published_constants():
    """Printed as lower bounds, cut after four digits."""
    assert 3.1546 <= capacity_constant(beta=1.0, K=3.0, d=20, p=0.001) < 3.1547
    assert 1.3718 <= capacity_constant(beta=1.0, K=1.0, d=75, p=0.001) < 1.3719
    c = capacity_constant(beta=0.5, K=2.0, d=30, p=0.01)
    a = 2 * (1 + math.log(2 * 0.5 * 4 * 0.01 * 29)) / 29
    b = 2 * 4 * 0.5 / 5
    assert (b / c) * math.exp(b / c) == pytest.approx(math.exp(a) * b, rel=1e-12)


def test_the_layer_learns_its_patterns():
    torch.manual_seed(0)
    layer = HopfieldRetrieval((5, 8), beta=4.0, steps=2, damping=0.7)
    target = drawn(7, 40, 8).float()
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    losses = []
    for _ in range(60):
        loss = (layer(target) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    again = HopfieldRetrieval((5, 8), beta=4.0, steps=2, damping=0.7)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(target), layer(target))
    assert "5 patterns of size 8" in repr(layer)
    one = HopfieldRetrieval(layer.patterns.detach(), beta=4.0)
    expected = (4.0 * target @ one.patterns.mT).softmax(-1) @ one.patterns
    torch.testing.assert_close(one(target), expected)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (0, 3, 4)])
def test_no_states_retrieve_nothing(shape):
    patterns, state = drawn(1, 5, 4).expand(*shape[:-2], 5, 4), torch.zeros(shape, dtype=F64)
    assert retrieve(state, patterns).state.shape == shape
    assert hopfield_energy(state, patterns).shape == shape[:-1]
