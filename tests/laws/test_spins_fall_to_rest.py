"""Classical Hopfield networks and the machines that are the same, against enumeration of all states.

[theory 5.6 for the modern ones; hopfield82, barra12]
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Empirical, Spins, reweight
from gradlogz.dynamics import Ising, boltzmann_machine, gaussian_machine, hebbian, spin_corners, visible_distribution
from support.scales import close

F64 = torch.float64
seeds = st.integers(0, 10_000)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def network(seed, d=6):
    W = drawn(seed, d, d)
    W = torch.triu(W, 1)
    return Ising(W + W.mT, drawn(seed + 1, d))


def all_states(d):
    """Written down by itertools, not by the package."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=F64)


def energy(W, b, x):
    return -sum(W[i, j] * x[i] * x[j] for i in range(len(x)) for j in range(i)) - sum(
        b[i] * x[i] for i in range(len(x))
    )


def test_the_cube_is_a_set_of_keys():
    """2^d keys of weight 1: G = sum log 2 cosh, mean tanh, covariance diag sech²; `Spins` but for the mass 2^d."""
    points, eta = all_states(5), 2 * drawn(0, 7, 5)
    assert torch.equal(spin_corners(5, like=eta), points)
    keys = Empirical(points)
    cube = reweight(Spins(torch.zeros(5, dtype=F64)), torch.tensor(5 * math.log(2), dtype=F64))
    for h in (keys, cube):
        close(h.log_normalizer(eta), (2 * eta.cosh()).log().sum(-1), 10.0)
        close(h.mean(eta), eta.tanh(), 10.0)
        close(h.covariance(eta), torch.diag_embed(eta.cosh() ** -2), 10.0)


def test_energies_are_those_of_the_pairs():
    net, states = network(0), all_states(6)
    close(net.energy(states), torch.stack([energy(net.weights, net.bias, x) for x in states]), 10.0)


@given(seed=seeds)
def test_one_by_one_the_energy_never_rises(seed):
    net, x = network(seed, 8), drawn(seed + 2, 20, 8).sign()
    before = net.energy(x)
    for _ in range(100):
        found = net.settle(x, max_iterations=1, throw=False)
        after = net.energy(found.state)
        assert bool((after <= before + 1e-12).all())
        moved = (found.state != x).any(-1)
        assert bool((after[moved] < before[moved]).all())
        x, before = found.state, after
        if bool(found.converged.all()):
            break
    assert bool(found.converged.all())
    for a in range(8):  # no single spin can lower it
        flipped = x.clone()
        flipped[:, a] *= -1
        assert bool((net.energy(flipped) >= before - 1e-12).all())


@given(seed=seeds)
def test_at_once_the_energy_of_two_states_in_a_row_never_rises(seed):
    """-<x', W x> - <b, x + x'>, so that a trajectory ends in one state or in a cycle of two."""
    net, x = network(seed, 8), drawn(seed + 2, 20, 8).sign()
    states = [x]
    for _ in range(60):
        states.append(net.settle(states[-1], order="synchronous", max_iterations=1, throw=False).state)
    pair = [-((y @ net.weights) * x).sum(-1) - (x + y) @ net.bias for x, y in itertools.pairwise(states)]
    assert all(bool((after <= before + 1e-12).all()) for before, after in itertools.pairwise(pair))
    assert torch.equal(states[-1], states[-3])


def test_two_spins_that_disagree_turn_for_ever_at_once():
    net = Ising(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64), torch.zeros(2, dtype=F64))
    x = torch.tensor([[1.0, -1.0]], dtype=F64)
    assert not bool(net.settle(x, order="synchronous", throw=False).converged)
    assert bool(net.settle(x).converged)


def test_stored_patterns_are_recalled():
    patterns = drawn(1, 8, 200).sign()
    net = hebbian(patterns)
    noisy = patterns * torch.where(drawn(2, 8, 200) > 1.0, -1.0, 1.0)  # 16 in 100 turned
    assert torch.equal(net.settle(noisy).state, patterns)
    overlaps = patterns @ patterns.mT
    close(net.energy(patterns), 8 / 2 - overlaps.square().sum(-1) / 400, 100.0)


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.5])
def test_the_exact_law_is_that_of_all_states(beta):
    net = network(3, 5)
    weights = [math.exp(-beta * energy(net.weights, net.bias, x)) for x in all_states(5)]
    p = torch.tensor(weights, dtype=F64) / sum(weights)
    law, zero = net.exact(beta=beta), torch.zeros(5, dtype=F64)
    close(law.log_normalizer(zero), torch.tensor(math.log(sum(weights)), dtype=F64), 100.0)
    close(law.mean(zero), p @ all_states(5), 10.0)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_means_are_stationary_points_of_a_bound_of_the_mass(beta):
    net = network(4, 6)
    found = net.mean_field(0.1 * drawn(5, 10, 6), beta=beta, method="newton", max_iterations=1000)
    m = found.state
    close(m, torch.tanh(beta * (m @ net.weights + net.bias)), tolerance=1e-8)
    point = m.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net.bound(point, beta=beta).sum(), point)
    close(slope, torch.zeros_like(slope), 1.0, tolerance=1e-6)
    mass = net.exact(beta=beta).log_normalizer(torch.zeros(6, dtype=F64))
    assert bool((net.bound(m, beta=beta) <= mass).all())
    assert bool((net.bound(drawn(6, 50, 6).tanh(), beta=beta) <= mass).all())
    free = Ising(torch.zeros(6, 6, dtype=F64), net.bias)  # without weights it is exact
    alone = free.mean_field(torch.zeros(6, dtype=F64), beta=beta).state
    zero = torch.zeros(6, dtype=F64)
    close(alone, free.exact(beta=beta).mean(zero), 10.0)
    close(free.bound(alone, beta=beta), free.exact(beta=beta).log_normalizer(zero), 10.0)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_hidden_gaussians_summed_out_leave_the_hebbian_network(beta):
    """The law of the spins is that of the network, and the log masses differ by the diagonal beta tr / 2."""
    patterns, bias, zero = drawn(7, 3, 6).sign(), 0.3 * drawn(8, 6), torch.zeros(6, dtype=F64)
    law, exact = (
        visible_distribution(gaussian_machine(patterns, bias, beta=beta)),
        hebbian(patterns, bias).exact(beta=beta),
    )
    close(law.log_weights - law.log_normalizer(zero), exact.log_weights - exact.log_normalizer(zero), 10.0)
    close(law.log_normalizer(zero), exact.log_normalizer(zero) + beta * 3 / 2, 10.0)
    # One hidden Gaussian by quadrature: ∫ exp(c z) dN(0, 1) = exp(c²/2) with c = sqrt(beta / d) <x_1, x>.
    one = gaussian_machine(patterns[:1], beta=beta)
    z = torch.linspace(-30, 30, 20_001, dtype=F64)
    c = math.sqrt(beta / 6) * all_states(6) @ patterns[0]
    integral = torch.trapezoid(torch.exp(c.unsqueeze(-1) * z - z**2 / 2) / math.sqrt(2 * math.pi), z)
    close(one.g.log_normalizer(all_states(6)), integral.log(), 10.0)


def test_a_chain_with_gaussians_draws_from_the_network():
    patterns = drawn(9, 2, 4).sign()
    machine = gaussian_machine(patterns, beta=0.8)
    start = torch.zeros(20_000, 4, dtype=F64)
    last = machine.chain(start, 30, generator=torch.Generator().manual_seed(0)).x[-1]
    exact = hebbian(patterns).exact(beta=0.8)
    # 20 000 independent chains: a standard error of 0.0035 at most.
    torch.testing.assert_close(visits(last), exact.log_weights.softmax(-1), rtol=0, atol=0.014)


def visits(draws):
    return (draws.unsqueeze(-2) == all_states(draws.shape[-1])).all(-1).double().mean(0)


def test_a_boltzmann_machine_is_a_pair_of_cubes():
    W, a, c = 0.7 * drawn(10, 4, 3), 0.5 * drawn(11, 4), 0.5 * drawn(12, 3)
    machine = boltzmann_machine(W, a, c)
    joint = torch.stack(
        [torch.stack([torch.exp(x @ W @ y + a @ x + c @ y) for y in all_states(3)]) for x in all_states(4)]
    )
    expected = joint.sum(-1) / joint.sum()
    law = visible_distribution(machine)
    close(law.log_weights.softmax(-1), expected)
    # The conditional means of either side.
    x, y = all_states(4), all_states(3)
    close(machine.h.mean(y @ W.mT), torch.tanh(a + y @ W.mT))
    close(machine.g.mean(x), torch.tanh(c + x @ W) @ W.mT, 10.0)
    chain = machine.chain(torch.zeros(20_000, 4, dtype=F64), 30, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(visits(chain.x[-1]), expected, rtol=0, atol=0.014)
    # Stationary: one more round of the chain, exactly, from the law of the visible spins.
    to_hidden = torch.stack([torch.sigmoid(2 * (c + v @ W)) for v in x])  # P(y_j = 1 | x)
    given_x = torch.stack([torch.where(h > 0, to_hidden, 1 - to_hidden).prod(-1) for h in y], -1)
    to_visible = torch.sigmoid(2 * (a + y @ W.mT))
    given_y = torch.stack([torch.where(v > 0, to_visible, 1 - to_visible).prod(-1) for v in x], -1)
    close(expected @ given_x @ given_y, expected)
