"""The dual, the link, maximum entropy and projection agree with direct optimisation.   [theory 3.5, 3.6, E11]

G*(u) = sup_eta <eta, u> - G(eta)        minimised here by scipy from plain formulas for G
outside the hull                         linear programming finds no weights with that mean
maximum entropy                          min { KL(q‖h) : E_q x = u } over the simplex itself (SLSQP)
projection                               min KL(P‖N(m, s²)) over m and s
"""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.special import logsumexp

import gradlogz as gz
from support.measure_registry import Source
from support.scales import close


def minimise(objective, start):
    """The minimum of a function that returns its value and gradient."""
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-11, "maxiter": 500})
    assert np.abs(found.jac).max() < 1e-7
    return found


def hull_weights(points, log_weights, u):
    """Probabilities on the points of positive weight with mean u, or None where linear programming finds none."""
    alive = np.isfinite(log_weights)
    equalities = np.vstack((points[alive].T, np.ones(alive.sum())))
    found = linprog(np.zeros(alive.sum()), A_eq=equalities, b_eq=np.append(u, 1.0), bounds=(0, None))
    return found.x if found.status == 0 else None


def empirical(seed, n=9, d=3):
    s = Source(seed)
    points, log_weights = s.normal(n, d), s.normal(n)
    log_weights[0] = -torch.inf
    return gz.Empirical(points, log_weights), points.numpy(), log_weights.numpy(), s


@pytest.mark.parametrize("seed", range(5))
def test_value_and_eta_are_those_of_direct_minimisation(seed):
    h, points, log_weights, s = empirical(seed)
    u = h.mean(s.normal(3)).numpy()

    def objective(eta):
        logits = points @ eta + log_weights
        G = logsumexp(logits)
        return G - eta @ u, np.exp(logits - G) @ points - u

    found, ours = minimise(objective, np.zeros(3)), gz.dual(h, torch.from_numpy(u))
    assert bool(ours.converged)
    assert float(ours.value) == pytest.approx(-found.fun, abs=1e-8)
    np.testing.assert_allclose(ours.eta, found.x, rtol=0, atol=1e-6)  # as exact as scipy's gradient tolerance


def number(x):
    return torch.tensor([x], dtype=torch.float64)


FAMILIES = {
    "gaussian": (
        gz.Gaussian.diagonal(number(0.3), number(2.0)),
        lambda e: 0.3 * e + e * e,
        [-4.0, 0.0, 5.0],
    ),
    "gamma": (
        gz.Gamma(number(2.0), number(1.5)),
        lambda e: -2.0 * np.log(1 - e / 1.5) if e < 1.5 else np.inf,
        [0.1, 1.0, 30.0],
    ),
    "poisson": (gz.Poisson(number(3.0)), lambda e: 3.0 * np.expm1(e), [0.1, 3.0, 40.0]),
    "spins": (
        gz.Spins(number(0.4)),
        lambda e: np.logaddexp(0.4 + e, -0.4 - e) - np.logaddexp(0.4, -0.4),
        [-0.99, 0.2, 0.9],
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_classical_families_on_the_line(name):
    h, G, means = FAMILIES[name]
    for u in means:
        options = {"xatol": 1e-10, "fatol": 1e-15}
        found = minimize(lambda e, u=u: G(e[0]) - e[0] * u, [0.0], method="Nelder-Mead", options=options)
        ours = gz.dual(h, number(u))
        assert float(ours.value) == pytest.approx(-found.fun, abs=1e-8)
        assert float(ours.eta) == pytest.approx(found.x[0], abs=1e-6, rel=1e-6)  # half the digits of the value


@pytest.mark.parametrize("seed", range(8))
def test_means_outside_the_hull_are_found_out_and_separated(seed):
    h, points, log_weights, s = empirical(seed)
    candidates = torch.cat((1.2 * s.normal(12, 3), h.mean(3 * s.normal(4, 3))))
    inside = np.array([hull_weights(points, log_weights, u) is not None for u in candidates.numpy()])
    assert 4 <= inside.sum() < 16
    found = gz.dual(h, candidates)
    assert bool(found.converged.all())
    np.testing.assert_array_equal(torch.isfinite(found.value).numpy(), inside)
    for u, direction, is_inside in zip(candidates.numpy(), found.separating.numpy(), inside, strict=True):
        if is_inside:
            np.testing.assert_array_equal(direction, 0.0)
        else:
            assert np.linalg.norm(direction) == pytest.approx(1.0)
            assert direction @ u > (points[np.isfinite(log_weights)] @ direction).max()


def test_the_mean_of_a_masked_point_is_outside():
    h, points, log_weights, _ = empirical(0)
    far = 10 * points[0]
    h = gz.Empirical(torch.from_numpy(np.vstack((points, far))), torch.from_numpy(np.append(log_weights, -np.inf)))
    assert float(gz.dual(h, torch.from_numpy(far)).value) == np.inf


def test_outside_the_plane_that_carries_the_points():
    s = Source(1)
    points = s.normal(8, 2) @ s.normal(2, 3) + s.normal(3)
    h, normal = gz.Empirical(points), torch.linalg.svd(points - points.mean(0))[2][2]
    result = gz.dual(h, points.mean(0) + 0.1 * normal)
    assert float(result.value) == np.inf
    # One normal separates as well as its opposite.
    close((result.separating * normal).sum().abs(), torch.ones((), dtype=torch.float64), tolerance=1e-8)


def test_on_the_boundary_the_value_is_that_of_the_face():
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    means = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.25, 0.0]], dtype=torch.float64)
    # A corner: -log w. An edge: KL of (3/4, 1/4) to the weights (1, 2) of its ends.
    truth = torch.tensor([0.0, -np.log(4), 0.75 * np.log(0.75) + 0.25 * np.log(0.125)], dtype=torch.float64)
    close(gz.dual(gz.Empirical.weighted(corners, weights), means, throw=False).value, truth, tolerance=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", [gz.Gamma, gz.InverseGaussian], ids=lambda family: family.__name__)
def test_a_boundary_without_mass_is_never_reached(family, dtype):
    two = torch.tensor([2.0], dtype=dtype)
    result = gz.dual(family(two, two), torch.zeros_like(two), throw=False)  # the truth is +inf
    assert float(result.value) == np.inf or not bool(result.converged)


@pytest.mark.parametrize("seed", range(4))
def test_maximum_entropy_is_the_solution_of_the_primal_problem(seed):
    s = Source(seed)
    points, log_weights = s.normal(6, 2), s.log_simplex(6)
    h = gz.Empirical(points, log_weights)
    u = h.mean(s.normal(2))
    x, log_w = points.numpy(), log_weights.numpy()

    def relative_entropy(q):
        return float(np.sum(q * (np.log(q) - log_w)))

    found = minimize(
        relative_entropy,
        np.full(6, 1 / 6),
        jac=lambda q: np.log(q) - log_w + 1,
        method="SLSQP",
        bounds=[(1e-12, 1)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1, "jac": lambda q: np.ones(6)},
            {"type": "eq", "fun": lambda q: q @ x - u.numpy(), "jac": lambda q: x.T},
        ],
        options={"ftol": 1e-15, "maxiter": 500},
    )
    law, eta, value = gz.measures.maximum_entropy(h, u)
    assert float(value) == pytest.approx(found.fun, abs=1e-8)
    np.testing.assert_allclose(h.probabilities(eta), found.x, rtol=0, atol=1e-6)  # minimiser: half the digits
    close(law.mean(torch.zeros_like(eta)), u, tolerance=1e-8)


def test_any_other_law_with_that_mean_is_farther_by_its_divergence_from_the_nearest():
    # KL(q‖h) = KL(q‖law) + relative_entropy for every q with the mean of law.   [theory 3.5]
    s = Source(9)
    points, log_weights = s.normal(7, 2), s.normal(7)
    h = gz.Empirical(points, log_weights)
    u = h.mean(s.normal(2))
    eta = gz.measures.maximum_entropy(h, u).eta
    p = h.probabilities(eta)
    along = torch.linalg.svd(torch.cat((points.T, torch.ones(1, 7, dtype=torch.float64))))[2][3]  # keeps mean and mass
    q = p + 0.5 * along * (p / along.abs()).min()
    to_h, to_law = (q * (q.log() - log_weights)).sum(), (q * (q / p).log()).sum()
    close(to_h, to_law + gz.dual(h, u).value, 10.0, tolerance=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_projection_on_the_normal_family_minimises_the_divergence(seed):
    s = Source(seed)
    source, eta = gz.Empirical(s.normal(8, 1), s.normal(8)), s.normal(1)
    family = gz.measures.from_distribution(torch.distributions.Normal(s.normal(), s.positive()))
    found = gz.measures.to_distribution(
        family, gz.measures.moment_project(family, source, eta, statistic=lambda y: torch.cat((y, y * y), -1))
    )
    y, p = source.points.squeeze(-1).numpy(), source.probabilities(eta).numpy()

    def divergence(parameters):  # KL(P‖N(m, s²)) up to the entropy of P, in m and log s
        m, log_s = parameters
        z = (y - m) * np.exp(-log_s)
        return p @ (z * z / 2) + log_s, np.array([-(p @ z) * np.exp(-log_s), 1 - p @ (z * z)])

    best = minimise(divergence, np.zeros(2)).x
    assert float(found.mean) == pytest.approx(best[0], abs=1e-8)
    assert float(found.stddev) == pytest.approx(np.exp(best[1]), abs=1e-8)


def test_projection_without_a_statistic_matches_the_mean():
    s = Source(4)
    source, family = gz.Empirical(s.normal(8, 2) * 0.3), gz.Spins(s.normal(2))
    eta = s.normal(2)
    u = (torch.softmax(source.points @ eta, -1) @ source.points).numpy()
    b = family.bias.numpy()
    found = minimise(lambda e: (np.logaddexp(b + e, -b - e).sum() - e @ u, np.tanh(b + e) - u), np.zeros(2))
    np.testing.assert_allclose(gz.measures.moment_project(family, source, eta), found.x, rtol=0, atol=1e-8)


def test_projection_by_draws_matches_their_average():
    s = Source(5)
    source, eta = gz.Gaussian(s.normal(1), s.covariance(1)), s.normal(1)
    family = gz.measures.from_distribution(torch.distributions.Normal(s.normal(), s.positive()))
    member = gz.measures.moment_project(
        family,
        source,
        eta,
        statistic=lambda y: torch.cat((y, y * y), -1),
        samples=20000,
        generator=torch.Generator().manual_seed(0),
    )
    found, law = gz.measures.to_distribution(family, member), gz.measures.to_distribution(source, eta)
    standard_error = float(law.variance.sqrt()) / np.sqrt(20000)
    assert abs(float(found.mean) - float(law.mean)) < 6 * standard_error
    assert abs(float(found.stddev) - float(law.variance.sqrt())) < 6 * standard_error  # sd of s is sd / sqrt(2n)
