"""Fixed points of maps of tokens: found, counted, differentiated by the implicit rule.   [theory 4.4, 5.8]"""

import pytest
import torch

from gradlogz import Gaussian, equilibrium, retrieve, secular_equilibrium, spectral_radius
from scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_the_sphere(keys, beta, tau):
    def step(x):
        y = x + tau * (beta * x @ keys.mT).softmax(-1) @ keys
        return y / y.norm(dim=-1, keepdim=True)

    return step


@pytest.mark.parametrize("method", ["anderson", "iterate"])
def test_the_place_is_one_of_rest(method):
    keys = drawn(0, 8, 4)
    step = on_the_sphere(keys, 1.5, 0.7)
    found = equilibrium(step, drawn(1, 20, 4), method=method, steps=3000)
    assert bool(found.converged.all())
    torch.testing.assert_close(step(found.state), found.state, rtol=0, atol=1e-9)
    assert len(found.distinct()) <= 8
    assert bool((spectral_radius(step, found.state) < 1).all()), "they attract"


def test_anderson_needs_fewer_steps():
    step = on_the_sphere(drawn(0, 8, 4), 1.5, 0.2)
    quick, slow = (equilibrium(step, drawn(1, 20, 4), method=m, steps=5000).steps for m in ("anderson", "iterate"))
    assert float(quick.double().mean()) < 0.5 * float(slow.double().mean())


def test_a_token_does_not_depend_on_its_neighbours():
    step, start = on_the_sphere(drawn(0, 8, 4), 1.5, 0.7), drawn(2, 6, 4)
    together = equilibrium(step, start)
    for i in range(6):
        alone = equilibrium(step, start[i : i + 1])
        close(together.state[i], alone.state[0], tolerance=1e-8)


def test_implicit_gradients_are_those_of_the_unrolled_steps():
    keys = drawn(3, 7, 3)
    start, weight = drawn(4, 5, 3), drawn(5, 5, 3)

    def implicit(k):
        return (
            equilibrium(on_the_sphere(k, 1.5, 0.7), start, tolerance=1e-14, throw=False, steps=500).state * weight
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
    found = equilibrium(step, drawn(8, 40, 4), steps=20_000, method="iterate")
    there = (found.state - x).norm(dim=-1) < 1e-5 * radius
    assert float(there.double().mean()) > 0.7
    assert len(found.distinct()) <= 2
    assert bool((h.log_normalizer(found.state[~there]) < h.log_normalizer(x)).all())
    value = h.log_normalizer(x)
    around = torch.nn.functional.normalize(drawn(9, 2000, 4), dim=-1) * radius
    assert bool((h.log_normalizer(around) <= value + 1e-12).all()), "the highest point of the sphere"


def test_cold_patterns_are_all_places_of_rest():
    patterns = torch.nn.functional.normalize(drawn(10, 6, 12), dim=-1)
    found = equilibrium(lambda x: retrieve(x, patterns, beta=40.0, steps=1, throw=False).state, patterns + 0.01)
    assert len(found.distinct()) == 6


def test_a_map_without_a_place_of_rest_says_so():
    found = equilibrium(lambda x: x + 1.0, drawn(0, 2, 3), steps=20, throw=False, method="iterate")
    assert not bool(found.converged.any())
    assert len(found.distinct()) == 0
