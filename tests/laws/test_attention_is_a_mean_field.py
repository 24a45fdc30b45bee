"""Vector spins: softmax attention as their mean field, against enumeration of all joint states and closed forms."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Empirical, Gaussian, attend, retrieve
from gradlogz.dynamics import Ising, VectorSpins
from support.scales import close

F64 = torch.float64
seeds = st.integers(0, 10_000)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def couplings(seed, n, d=None, size=0.3):
    if d is None:
        J = size * drawn(seed, n, n).triu(1)
        return J + J.mT
    J = size * drawn(seed, n, n, d, d) * torch.ones(n, n, dtype=F64).triu(1)[:, :, None, None]
    return J + J.permute(1, 0, 3, 2)


def energy(J, b, s):
    """The definition, pair by pair."""
    n = len(b)
    total = -sum(b[i] @ s[i] for i in range(n))
    for i in range(n):
        for j in range(i + 1, n):
            total = total - (s[i] @ J[i, j] @ s[j] if J.ndim == 4 else J[i, j] * (s[i] @ s[j]))
    return total


def enumerated(J, b, keys, beta):
    """Log partition function and means from every joint state."""
    states = [torch.stack(s) for s in itertools.product(keys, repeat=len(b))]
    logs = torch.stack([-beta * energy(J, b, s) for s in states])
    return logs.logsumexp(0), torch.einsum("s,snd->nd", logs.softmax(0), torch.stack(states))


@pytest.mark.parametrize("matrices", [False, True])
def test_the_exact_model_is_the_enumeration(matrices):
    keys, b = drawn(1, 4, 2), drawn(2, 3, 2)
    J = couplings(3, 3, 2 if matrices else None)
    spins = VectorSpins(Empirical(keys), J, b)
    log_Z, means = enumerated(J, b, keys, 0.7)
    exact, zero = spins.exact(beta=0.7), torch.zeros(6, dtype=F64)
    close(exact.log_normalizer(zero), log_Z, 100.0)
    close(exact.mean(zero).reshape(3, 2), means, 100.0)
    s = drawn(4, 3, 2)
    close(spins.energy(s), energy(J, b, s), 100.0)


def test_free_spins_are_softmax_attention_exactly():
    """Without couplings the mean field is the exact mean: attention with the fields as queries."""
    keys, queries = drawn(1, 5, 3), drawn(2, 3, 3)
    spins = VectorSpins(Empirical(keys), torch.zeros(3, 3, dtype=F64), queries)
    found = spins.mean_field(torch.zeros_like(queries), beta=1.3).state
    close(found, attend(queries, keys, keys, scale=1.3).output, 100.0)
    log_Z, means = enumerated(torch.zeros(3, 3, dtype=F64), queries, keys, 1.3)
    close(found, means, 100.0)
    close(spins.bound(1.3 * queries, beta=1.3), log_Z, 100.0)
    close(log_Z, attend(queries, keys, keys, scale=1.3).log_normalizer.sum(), 100.0)


@given(seed=seeds)
def test_independent_spins_bound_the_partition_function(seed):
    """For every eta; the bound is stationary at the solution of the mean-field equations."""
    keys, b, J = drawn(seed, 4, 2), drawn(seed + 1, 3, 2), couplings(seed + 2, 3, 2)
    spins = VectorSpins(Empirical(keys), J, b)
    log_Z, _ = enumerated(J, b, keys, 0.8)
    size = 1 + abs(float(log_Z))
    assert bool((spins.bound(2 * drawn(seed + 3, 50, 3, 2), beta=0.8) <= log_Z + 1e-12 * size).all())
    m = spins.mean_field(torch.zeros(3, 2, dtype=F64), beta=0.8, tolerance=1e-13, max_iterations=2000).state
    eta = 0.8 * (b + torch.einsum("ijde,je->id", J, m))
    close(spins.means(eta), m, 100.0)
    gradient = torch.func.grad(lambda e: spins.bound(e, beta=0.8))(eta)
    close(gradient, torch.zeros_like(eta), 1000.0)


def test_updates_of_single_spins_raise_the_bound():
    keys, b, J = drawn(1, 6, 2), drawn(2, 4, 2), couplings(3, 4, size=1.0)
    spins, eta = VectorSpins(Empirical(keys), J, b), drawn(4, 4, 2)
    bound = spins.bound(eta)
    for i in [0, 1, 2, 3] * 5:
        eta = eta.clone()
        eta[i] = (b + J @ spins.means(eta))[i]
        raised = spins.bound(eta)
        assert float(raised - bound) >= -1e-12
        bound = raised


def test_the_mean_field_is_exact_for_many_weakly_coupled_spins():
    """Couplings 1 / n: log Z per spin exceeds the bound by an amount that falls like 1 / n."""
    keys, gaps = torch.tensor([[1.0], [-0.5]], dtype=F64), []
    for n in (4, 8, 16):
        J = (torch.ones(n, n, dtype=F64) - torch.eye(n, dtype=F64)) / n
        b = torch.full((n, 1), 0.3, dtype=F64)
        spins = VectorSpins(Empirical(keys), J, b)
        m = spins.mean_field(b, tolerance=1e-13, max_iterations=2000).state
        exact = spins.exact().log_normalizer(torch.zeros(n, dtype=F64))
        gaps.append(float(exact - spins.bound(b + J @ m)) / n)
    assert 0 < gaps[2] < 0.7 * gaps[1] < 0.49 * gaps[0]


@pytest.mark.parametrize("matrices", [False, True])
def test_the_second_order_term_raises_the_order_of_the_error(matrices):
    """Couplings ten times smaller: the error of the bound falls by 100, that with the second order by 1000 at least."""
    keys, b, errors = drawn(1, 4, 2), drawn(2, 3, 2), []
    for size in (1e-1, 1e-2):
        J = couplings(3, 3, 2 if matrices else None, size=size)
        spins = VectorSpins(Empirical(keys), J, b)
        m = spins.mean_field(b, tolerance=1e-14, max_iterations=2000).state
        eta = b + spins._coupled(m)
        log_Z, _ = enumerated(J, b, keys, 1.0)
        errors.append([abs(float(log_Z - estimate)) for estimate in (spins.bound(eta), spins.second_order(eta))])
    (first, second), (first_small, second_small) = errors
    assert 50 < first / first_small < 200
    assert second / second_small > 500
    assert second < first


def test_two_signs_are_the_ising_model():
    J, b = couplings(1, 5), drawn(2, 5)
    signs = Empirical(torch.tensor([[1.0], [-1.0]], dtype=F64))
    spins, ising = VectorSpins(signs, J, b.unsqueeze(-1)), Ising(J, b)
    start = 0.1 * drawn(3, 5)
    options = {"beta": 0.9, "tolerance": 1e-13, "max_iterations": 2000}
    close(
        spins.mean_field(start.unsqueeze(-1), **options).state.squeeze(-1),
        ising.mean_field(start, **options).state,
        10.0,
    )
    m = 0.9 * drawn(3, 5).tanh()
    close(spins.bound(m.atanh().unsqueeze(-1), beta=0.9), ising.bound(m, beta=0.9), 100.0)
    zero = torch.zeros(5, dtype=F64)
    close(spins.exact(beta=0.9).log_normalizer(zero), ising.exact(beta=0.9).log_normalizer(zero), 100.0)


def test_a_gaussian_spin_and_a_spin_of_keys_are_a_modern_hopfield_network():
    """m_1 = att(m_1); the exact distribution of the Gaussian spin is a mixture, and the bound lies below its log Z."""
    keys, beta = drawn(1, 6, 3), 1.7
    gaussian = Gaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64) / beta)
    J = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    spins = VectorSpins((gaussian, Empirical(keys)), J, torch.zeros(2, 3, dtype=F64))
    start = torch.stack((keys[0], keys[0]))
    m = spins.mean_field(start, beta=beta, tolerance=1e-13, max_iterations=2000).state
    close(m[0], m[1], 10.0)
    close(m[0], (beta * keys @ m[0]).softmax(0) @ keys, 10.0)
    found = retrieve(keys[:1], keys, beta=beta, tolerance=1e-13, max_iterations=2000).state[0]
    close(m[0], found, 10.0)
    log_Z = (beta * keys.square().sum(-1) / 2).logsumexp(0)  # E exp(beta <s_1, k>) = exp(beta |k|² / 2)
    assert bool((spins.bound(drawn(2, 100, 2, 3), beta=beta) <= log_Z).all())


def test_attention_weights_as_couplings_make_a_residual_step():
    """Gaussian spins with couplings J(x): one update from m = x is x + softmax(x B x^T) x, without the token itself."""
    x, B = drawn(1, 5, 3), drawn(2, 3, 3)
    logits = (x @ B @ x.mT).fill_diagonal_(-math.inf)
    weights = logits.softmax(-1)
    close(x + weights @ x, x + attend(x @ B, x, x, scale=1.0, bias=logits - x @ B @ x.mT).output, 10.0)
    J = (weights + weights.mT) / 4
    spins = VectorSpins(Gaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64)), J, x)
    close(spins.update(x), x + J @ x, 10.0)
    close(spins.mean_field(x, tolerance=1e-13).state, torch.linalg.solve(torch.eye(5, dtype=F64) - J, x), 100.0)
    with pytest.raises(ValueError, match="not symmetric"):
        VectorSpins(spins.measure, weights, x)


def test_gaussian_means_are_exact():
    """Free energy of coupled Gaussians: means (I - J)^-1 b, log Z from the determinant; the bound misses only that."""
    J, b = couplings(1, 4, size=0.15), drawn(2, 4, 2)
    spins = VectorSpins(Gaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)), J, b)
    m = spins.mean_field(b, tolerance=1e-13).state
    precision = torch.eye(4, dtype=F64) - J
    close(m, torch.linalg.solve(precision, b), 100.0)
    log_Z = (b * m).sum() / 2 - torch.linalg.slogdet(precision)[1]
    close(spins.bound(b + J @ m) - torch.linalg.slogdet(precision)[1], log_Z, 100.0)


def test_solutions_have_gradients():
    keys, b = drawn(1, 4, 2).requires_grad_(), drawn(2, 3, 2).requires_grad_()
    J = couplings(3, 3, size=0.2)

    def function(keys, b):
        options = {"tolerance": 1e-13, "max_iterations": 2000}
        return VectorSpins(Empirical(keys), J, b).mean_field(torch.zeros(3, 2, dtype=F64), **options).state

    assert torch.autograd.gradcheck(function, (keys, b), fast_mode=True, check_undefined_grad=False)
