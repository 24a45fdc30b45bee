"""Equilibria of clouds that attend to themselves, and their stability.   [note 1; theory 4.4-4.6]

Gaussian clouds are compared with quadrature over their tokens, growth factors with the derivative of a step, by
quadrature too. Theorem 1 is in paper_section_3_3.py.

Read next: dynamics_statements.py (energy, collapse, equilibria of tokens), ../dynamics/growth.py.
"""

import functools
import math

import torch
from torch.nn.functional import normalize

from .. import dynamics as dyn
from .._typing import Tensor
from .definition import FLOAT, gaussian_nodes, line, normal, number, softmax_average, spread
from .statement import Outcome, gap, statement, violation

# Gaussian clouds ----------------------------------------------------------------------------------------------------


@statement(
    "4.4 moments", "theory", corrected="N(m,C) attends to itself: m' = m + τW(m + βCB^T m), C' = JCJ^T, J = I + τβWCB^T"
)
def moments_of_a_gaussian_cloud() -> Outcome:
    m, C, B, W = 0.5 * normal(2, seed=1), 0.5 * spread(2, seed=2), 0.3 * normal(2, 2, seed=3), normal(2, 2, seed=4)
    tau, beta, worst = 0.7, 0.8, 0.0
    x, log_p = gaussian_nodes(m, C, 12.0, 41)
    p = log_p.exp()
    attended = softmax_average(x @ B, x, beta, log_p) @ W.T  # logits β<x, B y>
    for residual in (True, False):
        y = tau * attended + (x if residual else 0.0)
        mean = p @ y
        covariance = ((y - mean).T * p) @ (y - mean)
        ascent = dyn.Ascent(tau=tau, beta=beta, B=B, W_v=W, residual=residual)
        after = dyn.GaussianCloud(m, C).evolve(ascent)
        worst = max(worst, gap(after.mean, mean, 10.0), gap(after.covariance, covariance, 10.0))
    return Outcome(worst)


@statement(
    "4.4 flow",
    "theory",
    corrected="in continuous time C(t)⁻¹ = C(0)⁻¹ - 2βt: dC/dt = 2βC², blow-up at t = 1/(2β c_max)",
)
def precision_falls_linearly() -> Outcome:
    C, beta, m = spread(2, seed=2), 0.8, torch.zeros(2, dtype=FLOAT)
    cloud, largest = dyn.GaussianCloud(m, C), torch.linalg.eigvalsh(C)[-1]
    end = 1 / (2 * beta * largest)
    time, steps = 0.5 * float(end), 400
    S, h = C, time / steps

    def rate(S: Tensor) -> Tensor:
        return 2 * beta * S @ S

    for _ in range(steps):  # Runge and Kutta
        a = rate(S)
        b = rate(S + h / 2 * a)
        c = rate(S + h / 2 * b)
        S = S + h / 6 * (a + 2 * b + 2 * c + rate(S + h * c))
    return Outcome(max(gap(cloud.flow(time, beta=beta), S, 10.0), gap(cloud.blow_up_time(beta=beta), end)))


def _hermite(n: int, z: Tensor) -> Tensor:
    """He_n by its recursion."""
    before, now = torch.ones_like(z), z
    for k in range(1, n):
        before, now = now, z * now - k * before
    return now


@statement(
    "E36, 4.4 growth",
    "note 1 3.1",
    printed="clouds approach the Gaussian: factors <= 1",
    corrected="Hermite mode n grows by 1 + nτ(βc)^(n-1)/(1+τβc): the Gaussian repels if τ > 0, attracts if τ < 0",
)
def gaussian_is_unstable() -> Outcome:
    """The density is N(0, c)(1 + ε He_n); the factor is the derivative in ε of the n-th coefficient after a step."""
    z, log_step = line(-12.0, 12.0, 161)
    p0 = (log_step - z**2 / 2).exp() / math.sqrt(2 * math.pi)

    def coefficient(n: int, eps: Tensor, c: float, beta: float, tau: float) -> Tensor:
        p, x = p0 * (1 + eps * _hermite(n, z)), math.sqrt(c) * z
        logits = beta * x.unsqueeze(-1) * x
        weights = p * (logits - logits.amax(-1, keepdim=True)).exp()
        y = x + tau * (weights @ x) / weights.sum(-1)
        mean = (p * y).sum()
        standard = (y - mean) / (p * (y - mean) ** 2).sum().sqrt()
        return (p * _hermite(n, standard)).sum() / math.factorial(n)

    zero, one = torch.zeros((), dtype=FLOAT), torch.ones((), dtype=FLOAT)
    worst, printed = 0.0, 0.0
    for c, beta, tau in ((1.3, 0.4, 0.6), (0.8, 0.5, -0.4)):
        for n in (3, 4, 5):
            after = functools.partial(coefficient, n, c=c, beta=beta, tau=tau)
            factor = torch.func.jvp(after, (zero,), (one,))[1]
            predicted = dyn.hermite_growth(n, variance=c, beta=beta, tau=tau)
            wrong_side = float((predicted > 1) != (tau > 0))
            worst = max(worst, gap(number(predicted), factor, 10.0), wrong_side)
            printed = max(printed, float(factor) - 1)
    return Outcome(worst, printed)


@statement(
    "4.4 secular",
    "theory",
    corrected="frozen N(μ,Σ) and the sphere: x* = (λI-Σ)⁻¹μ, |x*| = r, λ > λ_max, where the projected ascent ends",
)
def secular_equation() -> Outcome:
    mu, Sigma, r = normal(3, seed=1), spread(3, seed=2), 1.3
    x = r * normalize(mu, dim=-1)
    for _ in range(3000):
        y = x + 2.0 * (mu + Sigma @ x)
        x = r * y / y.norm()
    actual = dyn.secular_equilibrium(mu, Sigma, radius=r)
    multiplier = (mu + Sigma @ actual) @ actual / r**2
    largest = torch.linalg.eigvalsh(Sigma)[-1]
    return Outcome(max(gap(actual, x, 10.0), violation(largest, multiplier)))


# The sphere, and whitening ------------------------------------------------------------------------------------------


def _circle(n: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(n, dtype=FLOAT) * (2 * math.pi / n)
    return angle, torch.stack((angle.cos(), angle.sin()), -1)


@statement(
    "4.5",
    "theory",
    corrected="the uniform distribution on a sphere is an equilibrium of attention and projection, token by token",
)
def uniform_sphere_is_an_equilibrium() -> Outcome:
    _, circle = _circle(100)
    _, square = _circle(4)
    octahedron = torch.cat((torch.eye(3, dtype=FLOAT), -torch.eye(3, dtype=FLOAT)))
    worst = 0.0
    for points, name in ((circle, "sphere"), (math.sqrt(2) * square, "rms_norm"), (octahedron, "sphere")):
        for tau, beta in ((0.5, 2.0), (3.0, 9.0), (-0.3, 1.0)):
            after = dyn.evolve(points, dyn.Ascent(tau=tau, beta=beta), contraction=name, steps=3).cloud
            worst = max(worst, gap(after, points, 10.0))
    return Outcome(worst)


def _on_the_circle(degree: int, eps: Tensor, beta: float, tau: float) -> Tensor:
    """Coefficient of cos(l angle) after a step from the density 1 + ε cos(l angle)."""
    angle, circle = _circle(240)
    p = (1 + eps * (degree * angle).cos()) / 240
    y = circle + tau * softmax_average(circle, circle, beta, p.log())
    return 2 * (p * (degree * torch.atan2(y[:, 1], y[:, 0])).cos()).sum()


def _on_the_sphere(degree: int, eps: Tensor, beta: float, tau: float) -> Tensor:
    """Coefficient of the Legendre polynomial of the height after a step from 1 + ε P_l; heights tanh(u), 24 around."""
    u, log_step = line(-17.0, 17.0, 205)
    height, side = u.tanh(), 1 / u.cosh()
    mass = side**2 * log_step.exp() / 2
    _, circle = _circle(24)
    keys = torch.cat((side.reshape(-1, 1, 1) * circle, height.reshape(-1, 1, 1).expand(-1, 24, 1)), -1)

    def legendre(z: Tensor) -> Tensor:
        before, now = torch.ones_like(z), z
        for k in range(1, degree):
            before, now = now, ((2 * k + 1) * z * now - k * before) / (k + 1)
        return now

    p = mass * (1 + eps * legendre(height))
    tokens = keys[:, 0]  # one for each height
    y = tokens + tau * softmax_average(tokens, keys.flatten(0, 1), beta, (p / 24).log().repeat_interleave(24))
    return (2 * degree + 1) * (p * legendre(y[:, 2] / y.norm(dim=-1))).sum()


@statement(
    "4.5 growth",
    "theory",
    corrected="harmonics of degree l grow by 1 + τ/(1+τa) (I_{l+D/2-1}/I_{D/2-1})(β) l(l+D-2)/β, a = I_{D/2}/I_{D/2-1}",
)
def harmonics_grow() -> Outcome:
    zero, one, worst = torch.zeros((), dtype=FLOAT), torch.ones((), dtype=FLOAT), 0.0
    for dim, coefficient, beta, tau in (
        (2, _on_the_circle, 1.0, 0.5),
        (2, _on_the_circle, 5.0, 2.0),
        (2, _on_the_circle, 3.0, -0.2),
        (3, _on_the_sphere, 4.0, 0.7),
    ):
        factors = []
        for degree in range(1, 6):
            after = functools.partial(coefficient, degree, beta=beta, tau=tau)
            factors.append(torch.func.jvp(after, (zero,), (one,))[1])
            predicted = dyn.sphere_growth(degree, dim=dim, beta=beta, tau=tau)
            worst = max(worst, gap(number(predicted), factors[-1], 10.0))
        fastest = int((tau * (torch.stack(factors) - 1)).argmax()) + 1
        worst = max(worst, float(dyn.fastest_degree(dim=dim, beta=beta) != fastest))
    return Outcome(worst)


@statement(
    "4.6",
    "theory",
    corrected="under whitening d+1 points in general position rest, with any multiplicities; two even ones attract",
)
def few_points_rest_under_whitening() -> Outcome:
    corners = normal(3, 2, seed=1)[torch.tensor([0, 0, 0, 1, 1, 2])]
    away = corners - corners.mean(0)
    values, vectors = torch.linalg.eigh(away.T @ away / 6)
    white = away @ (vectors * values.rsqrt()) @ vectors.T
    beta, tau = 0.9, 0.6
    ascent = dyn.Ascent(tau=tau, beta=beta)
    rest = gap(dyn.evolve(white, ascent, contraction="zca", steps=3).cloud, white, 10.0)
    sides, inside = number(1.0, 1.0, -1.0, -1.0), number(1.0, -1.0, 1.0, -1.0)

    def departure(eps: Tensor) -> Tensor:
        cloud = (sides + eps * inside).unsqueeze(-1)  # the moments change in second order only
        return (dyn.evolve(cloud, ascent, contraction="zca", steps=1).cloud[:, 0] * inside).mean()

    zero, one = torch.zeros((), dtype=FLOAT), torch.ones((), dtype=FLOAT)
    factor = torch.func.jvp(departure, (zero,), (one,))[1]
    expected = (1 + tau * beta / math.cosh(beta) ** 2) / (1 + tau * math.tanh(beta))
    return Outcome(max(rest, gap(factor, number(expected), 10.0), violation(factor, number(1.0))))
