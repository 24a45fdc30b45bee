"""Fixed points of maps of tokens: found, counted, differentiated by the implicit rule.   [theory 4.4, 5.8]"""

import itertools

import pytest
import torch

from gradlogz import Gaussian, equilibrium, retrieve
from gradlogz.dynamics import jacobian_penalty, secular_equilibrium, spectral_radius
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_the_sphere(keys, beta, tau):
    def step(x):
        y = x + tau * (beta * x @ keys.mT).softmax(-1) @ keys
        return y / y.norm(dim=-1, keepdim=True)

    return step


METHODS = ["anderson", "newton", "iterate"]


@pytest.mark.parametrize("method", METHODS)
def test_the_place_is_one_of_rest(method):
    keys = drawn(0, 8, 4)
    step = on_the_sphere(keys, 1.5, 0.7)
    found = equilibrium(step, drawn(1, 20, 4), method=method, max_iterations=3000)
    assert bool(found.converged.all())
    torch.testing.assert_close(step(found.state), found.state, rtol=0, atol=1e-9)
    if method != "newton":  # which also finds the places between those that attract
        assert len(found.distinct()) <= 8
        assert bool((spectral_radius(step, found.state) < 1).all()), "they attract"


def test_anderson_needs_fewer_steps():
    step = on_the_sphere(drawn(0, 8, 4), 1.5, 0.2)
    quick, slow = (
        equilibrium(step, drawn(1, 20, 4), method=m, max_iterations=5000).steps for m in ("anderson", "iterate")
    )
    assert float(quick.double().mean()) < 0.5 * float(slow.double().mean())


@pytest.mark.parametrize("method", METHODS)
def test_a_token_does_not_depend_on_its_neighbours(method):
    step, start = on_the_sphere(drawn(0, 8, 4), 1.5, 0.7), drawn(2, 6, 4)
    together = equilibrium(step, start, method=method)
    for i in range(6):
        alone = equilibrium(step, start[i : i + 1], method=method)
        close(together.state[i], alone.state[0], tolerance=1e-8)
        assert int(together.steps[i]) == int(alone.steps[0])


@pytest.mark.parametrize("size", [3, 40])  # fewer dimensions than products of one solve, and more
def test_newton_squares_the_residual(size):
    W = 0.9 * torch.linalg.qr(drawn(20, size, size)).Q
    b = drawn(21, size)

    def step(x):
        return torch.tanh(x @ W.mT + b)

    sizes = []
    for steps in range(1, 9):
        found = equilibrium(step, torch.zeros(1, size, dtype=F64), method="newton", max_iterations=steps, throw=False)
        sizes.append(float(found.residual))
    near = [(before, after) for before, after in itertools.pairwise(sizes) if 1e-6 < before < 0.3]
    assert len(near) >= 2
    assert all(after <= 10 * before**2 + 1e-13 for before, after in near), sizes
    assert sizes[-1] < 1e-10


def test_newton_finds_places_that_repel():
    """Of x -> r x (1 - x) with r = 3.5 plain steps cycle around 1 - 1/r, where the slope is 2 - r."""

    def step(x):
        return 3.5 * x * (1 - x)

    start = torch.tensor([[0.6], [0.75]], dtype=F64)
    found = equilibrium(step, start, method="newton")
    close(found.state, torch.full_like(start, 1 - 1 / 3.5), tolerance=1e-9)
    close(spectral_radius(step, found.state), torch.full((2,), 1.5, dtype=F64), tolerance=1e-6)
    assert not bool(equilibrium(step, start, method="iterate", throw=False).converged.any())
    A = 3 * torch.linalg.qr(drawn(22, 4, 4)).Q  # every direction grows, and no residual falls by plain steps
    found = equilibrium(lambda x: x @ A.mT + 1.0, drawn(23, 5, 4), method="newton")
    expected = torch.linalg.solve(torch.eye(4, dtype=F64) - A, torch.ones(4, dtype=F64))
    close(found.state, expected.expand(5, 4), tolerance=1e-9)


def test_gradients_at_a_place_that_repels():
    """x* = 1 - 1/r, so dx*/dr = 1/r²."""
    r = torch.tensor(3.5, dtype=F64, requires_grad=True)
    found = equilibrium(lambda x: r * x * (1 - x), torch.tensor([[0.6]], dtype=F64), method="newton").state
    (gradient,) = torch.autograd.grad(found.sum(), r)
    close(gradient, torch.tensor(3.5**-2, dtype=F64), tolerance=1e-9)


def test_newton_returns_to_plain_steps_where_its_own_lead_nowhere():
    """|f(x) - x| has a minimum above 0 near 1, where 1 - f' vanishes and Newton's steps are infinite."""

    def step(x):
        return x - 0.05 * (0.02 + (x - 1) ** 2) * torch.tanh(x)

    found = equilibrium(step, torch.tensor([[1.2], [1.0], [3.0]], dtype=F64), method="newton", max_iterations=2000)
    close(found.state, torch.zeros(3, 1, dtype=F64), tolerance=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_that_hang_together_rest_together(method):
    """An affine map of the n d coordinates of each sample, whose fixed point is a linear solve."""
    A = torch.stack([0.8 * torch.linalg.qr(drawn(30 + i, 12, 12)).Q for i in range(2)])
    b = drawn(32, 2, 12)

    def step(x):
        return ((A @ x.flatten(-2).unsqueeze(-1)).squeeze(-1) + b).unflatten(-1, (4, 3))

    found = equilibrium(step, drawn(33, 2, 4, 3), tokens_interact=True, method=method, max_iterations=500)
    expected = torch.linalg.solve(torch.eye(12, dtype=F64) - A, b).unflatten(-1, (4, 3))
    close(found.state, expected, 10.0, tolerance=1e-8)
    assert found.converged.shape == (2,)
    assert found.distinct().shape == (2, 4, 3)
    close(spectral_radius(step, found.state, tokens_interact=True), torch.full((2,), 0.8, dtype=F64), tolerance=1e-9)


def test_the_penalty_is_the_mean_square_of_the_singular_values():
    """Exact for J = diagonal, where signs cancel; otherwise on average, in value and gradient."""
    a, x = drawn(40, 5).requires_grad_(), drawn(41, 3, 5)
    close(jacobian_penalty(lambda x: a * x, x), a.square().mean().expand(3).detach(), 10.0)
    A = drawn(42, 4, 4).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    found = jacobian_penalty(lambda x: x @ A.mT, drawn(43, 4000, 4), probes=5, generator=generator)
    exact = A.detach().square().sum() / 4
    error = float(found.detach().std()) / 4000**0.5
    assert abs(float(found.detach().mean() - exact)) < 4 * error < 0.05 * float(exact)
    (gradient,) = torch.autograd.grad(found.mean(), A)
    torch.testing.assert_close(gradient, A.detach() / 2, rtol=0, atol=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_implicit_gradients_are_those_of_the_unrolled_steps(method):
    keys = drawn(3, 7, 3)
    start, weight = drawn(4, 5, 3), drawn(5, 5, 3)
    # Newton's method may go elsewhere from far away: all start near the places that plain steps reach.
    start = equilibrium(
        on_the_sphere(keys, 1.5, 0.7), start, method="iterate", max_iterations=2000
    ).state + 0.01 * drawn(6, 5, 3)

    def implicit(k):
        return (
            equilibrium(
                on_the_sphere(k, 1.5, 0.7), start, method=method, tolerance=1e-14, throw=False, max_iterations=800
            ).state
            * weight
        ).sum()

    def unrolled(k):
        x, step = start, on_the_sphere(k, 1.5, 0.7)
        for _ in range(800):
            x = step(x)
        return (x * weight).sum()

    expected = torch.autograd.grad(unrolled(k := keys.clone().requires_grad_()), k)[0]
    actual = torch.autograd.grad(implicit(k := keys.clone().requires_grad_()), k)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
def test_gaussian_keys_on_the_sphere_obey_the_secular_equation(radius):
    A = drawn(6, 4, 4)
    mu, Sigma = drawn(7, 4), A @ A.mT / 4
    x = secular_equilibrium(mu, Sigma, radius=radius)
    close(x.norm(), torch.tensor(radius, dtype=F64), scale=10.0)
    h = Gaussian(mu, Sigma)

    def step(x):
        y = x + 0.8 * h.mean(x)
        return radius * y / y.norm(dim=-1, keepdim=True)

    torch.testing.assert_close(step(x), x, rtol=0, atol=1e-12 * (1 + radius))
    # Tokens end there, but for those in the basin of the one other local maximum that a quadratic can have on a sphere.
    found = equilibrium(step, drawn(8, 40, 4), max_iterations=20_000, method="iterate")
    there = (found.state - x).norm(dim=-1) < 1e-5 * radius
    assert float(there.double().mean()) > 0.7
    assert len(found.distinct()) <= 2
    assert bool((h.log_normalizer(found.state[~there]) < h.log_normalizer(x)).all())
    value = h.log_normalizer(x)
    around = torch.nn.functional.normalize(drawn(9, 2000, 4), dim=-1) * radius
    assert bool((h.log_normalizer(around) <= value + 1e-12).all()), "the highest point of the sphere"


@pytest.mark.parametrize("along", [0.0, 1e-200, 1e-14, -1e-14])
def test_a_mean_across_the_main_axis_has_a_fixed_point_on_the_sphere(along):
    """lambda = lambda_max: the main axis makes up for the length that the other coordinates lack."""
    mu, Sigma = torch.tensor([0.1, along], dtype=F64), torch.diag(torch.tensor([1.0, 2.0], dtype=F64))
    side = -1.0 if along < 0 else 1.0
    expected = torch.tensor([0.1, side * 0.99**0.5], dtype=F64)  # (lambda - 1) x_1 = 0.1, |x| = 1
    close(secular_equilibrium(mu, Sigma), expected, scale=10.0)


def test_a_long_mean_across_the_main_axis_is_its_own_direction():
    mu, Sigma = torch.tensor([3.0, 0.0], dtype=F64), torch.diag(torch.tensor([1.0, 2.0], dtype=F64))
    close(secular_equilibrium(mu, Sigma), torch.tensor([1.0, 0.0], dtype=F64), scale=10.0)


def test_cold_patterns_are_all_places_of_rest():
    patterns = torch.nn.functional.normalize(drawn(10, 6, 12), dim=-1)
    found = equilibrium(
        lambda x: retrieve(x, patterns, beta=40.0, max_iterations=1, throw=False).state, patterns + 0.01
    )
    assert len(found.distinct()) == 6


def test_a_map_without_a_place_of_rest_says_so():
    found = equilibrium(lambda x: x + 1.0, drawn(0, 2, 3), max_iterations=20, throw=False, method="iterate")
    assert not bool(found.converged.any())
    assert len(found.distinct()) == 0
