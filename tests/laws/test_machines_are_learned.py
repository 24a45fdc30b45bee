"""Gradients of machines and contrastive divergence, against enumeration of all states by itertools.   [theory E31]"""

import itertools

import pytest
import torch

from gradlogz.dynamics import (
    boltzmann_machine,
    contrastive_divergence,
    exact_gradient,
    fit_machine,
    gaussian_machine,
    visible_log_likelihood,
)
from support.scales import close

F64 = torch.float64
D, E = 4, 2


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def cube(d):
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=F64)


def parameters(seed=0, scale=0.6):
    return scale * drawn(seed, D, E), 0.3 * drawn(seed + 1, D), 0.3 * drawn(seed + 2, E)


def log_likelihood(W, a, c, data):
    """Mean of log p(x), with p(x, y) over all pairs of states."""
    joint = torch.stack([torch.stack([x @ W @ y + a @ x + c @ y for y in cube(E)]) for x in cube(D)])
    log_p = joint.logsumexp(-1) - joint.flatten().logsumexp(0)
    index = [int((cube(D) == x).all(-1).nonzero()) for x in data]
    return log_p[index].mean()


def kernel(W, a, c):
    """P(x' | x) = sum_y P(y | x) P(x' | y), both conditionals from the joint distribution of all pairs."""
    joint = torch.stack([torch.stack([torch.exp(x @ W @ y + a @ x + c @ y) for y in cube(E)]) for x in cube(D)])
    return (joint / joint.sum(1, keepdim=True)) @ (joint / joint.sum(0)).mT


def expected(W, a, c, data, k):
    """CD-k in expectation: the data, and k rounds of the kernel from each of them; E[y | x] by enumeration."""
    means = []
    for x in cube(D):
        p = torch.stack([torch.exp(x @ W @ y + c @ y) for y in cube(E)])
        means.append((p / p.sum()) @ cube(E))
    y = torch.stack(means)
    first = torch.stack([(cube(D) == x).all(-1).double() for x in data]).mean(0)
    last = first @ torch.linalg.matrix_power(kernel(W, a, c), k)
    change = first - last
    return torch.einsum("s,sd,se->de", change, cube(D), y), change @ cube(D), change @ y


def test_the_exact_gradient_is_that_of_the_log_likelihood():
    values = [p.requires_grad_() for p in parameters()]
    data = drawn(3, 6, D).sign()
    slopes = torch.autograd.grad(log_likelihood(*values, data), values)
    machine = boltzmann_machine(*(p.detach() for p in values))
    for ours, slope in zip(exact_gradient(machine, data), slopes, strict=False):
        close(ours, slope, 10.0)
    close(visible_log_likelihood(machine, data).mean(), log_likelihood(*parameters(), data), 10.0)


def test_gaussian_hidden_units_have_a_gradient_too():
    """log p(x) = |A^T x|²/2 + <a, x> - log Z, the Gaussians integrated out; by automatic differentiation."""
    patterns, a, data = drawn(4, 3, D).sign(), 0.2 * drawn(5, D), drawn(6, 7, D).sign()
    A = (patterns.mT * (0.8 / D) ** 0.5).requires_grad_()
    field = a.clone().requires_grad_()

    def log_weight(x):
        return (x @ A).square().sum(-1) / 2 + x @ field

    mean = (log_weight(data) - log_weight(cube(D)).logsumexp(0)).mean()
    slopes = torch.autograd.grad(mean, (A, field))
    machine = gaussian_machine(patterns, a / 0.8, beta=0.8)
    ours = exact_gradient(machine, data)
    close(ours.weights, slopes[0], 10.0)
    close(ours.visible_bias, slopes[1], 10.0)
    assert ours.hidden_bias is None
    close(visible_log_likelihood(machine, data).mean(), mean.detach(), 10.0)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_expected_contrastive_divergence_is_that_of_the_kernel(k):
    values, data = parameters(), drawn(3, 6, D).sign()
    for ours, oracle in zip(
        exact_gradient(boltzmann_machine(*values), data, steps=k), expected(*values, data, k), strict=False
    ):
        close(ours, oracle, 10.0)


def test_contrastive_divergence_tends_to_the_gradient():
    """The bias falls by the second eigenvalue of the kernel in each round, to rounding; at k = 1 it is no rounding."""
    values, data = parameters(), drawn(3, 6, D).sign()
    machine = boltzmann_machine(*values)
    rate = float(torch.linalg.eigvals(kernel(*values)).abs().sort().values[-2])
    exact = exact_gradient(machine, data).weights
    off = [float((exact_gradient(machine, data, steps=k).weights - exact).norm()) for k in (1, 10, 11, 400)]
    assert off[0] > 0.05 * float(exact.norm())
    assert off[0] > off[1] > off[2]
    assert abs(off[2] / off[1] - rate) < 0.01
    assert off[3] < 1e-12


@pytest.mark.parametrize("k", [1, 3])
def test_samples_have_that_expectation(k):
    """Copies of the data, each with its own chain: the mean within five standard errors, from blocks of chains."""
    values, data = parameters(), drawn(3, 6, D).sign()
    machine, g = boltzmann_machine(*values), torch.Generator().manual_seed(7)
    blocks = [contrastive_divergence(machine, data.repeat(100, 1), steps=k, generator=g) for _ in range(100)]
    for name, oracle in zip(("weights", "visible_bias", "hidden_bias"), expected(*values, data, k), strict=True):
        estimates = torch.stack([getattr(b, name) for b in blocks])
        error = estimates.std(0) / len(blocks) ** 0.5
        assert bool(((estimates.mean(0) - oracle).abs() < 5 * error).all())


def test_persistent_chains_continue():
    """Chains that start in the distribution of the machine stay there: the estimate is that of the exact gradient."""
    values, data = parameters(), drawn(3, 6, D).sign()
    machine, g = boltzmann_machine(*values), torch.Generator().manual_seed(8)
    start = contrastive_divergence(machine, data.repeat(3000, 1), steps=40, generator=g).visible
    persistent = contrastive_divergence(machine, data, start=start, generator=g)
    from_data = contrastive_divergence(machine, data.repeat(3000, 1), generator=g)
    exact = exact_gradient(machine, data).weights
    assert float((persistent.weights - exact).norm()) < 0.2 * float((from_data.weights - exact).norm())
    assert persistent.visible.shape == start.shape


@pytest.mark.parametrize(
    "options", [{"steps": None}, {"steps": 1}, {"steps": 3}, {"steps": 1, "persistent": True}], ids=str
)
def test_learning_raises_the_likelihood(options):
    """Bars: both halves of a state agree within themselves. Log likelihood at the start, at the end and at best."""
    data = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [-1, -1, 1, 1], [-1, -1, -1, -1]], dtype=F64).repeat(25, 1)
    machine = boltzmann_machine(0.1 * drawn(9, D, E), torch.zeros(D, dtype=F64), torch.zeros(E, dtype=F64))
    g = torch.Generator().manual_seed(10)
    fitted = fit_machine(machine, data, updates=200, rate=0.2, generator=g, **options)
    before, after = (float(visible_log_likelihood(m, data).mean()) for m in (machine, fitted))
    best = -torch.tensor(4.0).log().item()  # minus the entropy of the data
    assert before < after <= best
    assert best - after < 0.3 * (best - before)


def test_contrastive_divergence_is_the_gradient_of_no_function():
    """The Jacobian of a gradient is symmetric; that of the expectation of CD-k is not.   [sutskever10]"""
    sizes, data = (D * E, D, E), drawn(3, 6, D).sign()
    point = torch.cat([p.flatten() for p in parameters()])

    def field(vector, steps):
        W, a, c = vector.split(sizes)
        parts = exact_gradient(boltzmann_machine(W.view(D, E), a, c), data, steps=steps)[:3]
        return torch.cat([p.flatten() for p in parts])

    for steps, symmetric in ((None, True), (1, False), (3, False)):
        J = torch.autograd.functional.jacobian(lambda v, k=steps: field(v, k), point)
        twist = float((J - J.mT).norm() / J.norm())
        assert twist < 1e-12 if symmetric else twist > 1e-3
