"""Statements of section 3.3 of the paper: expansion, contraction, Theorem 1 and its scope.   [theory 4.1-4.3, E14-E17]

Read next: draft_notes.py (the two draft notes), measure_families.py (closed forms of each measure).
"""

import torch
from torch.nn.functional import layer_norm

from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, generator, normal, number, spread
from .statement import Outcome, gap, statement, violation


def _keys() -> Tensor:
    return normal(7, 3, seed=1)


# Section 3.3: expansion and contraction -----------------------------------------------------------------------------


@statement("E14", "paper 3.3", printed="attention lies in conv(keys)", corrected="attention lies in conv(values)")
def convex_combination_of_values() -> Outcome:
    k, v, q, directions = _keys(), 3 * normal(7, 3, seed=3), normal(4, 3, seed=2), normal(200, 3, seed=4)
    out = gz.Empirical(k).expect(v, q) @ directions.T
    of_values = gz.Empirical(v).support(directions)
    of_keys = gz.Empirical(k).support(directions)
    return Outcome(violation(out, of_values.expand_as(out)), violation(out, of_keys.expand_as(out)))


@statement(
    "E15a",
    "paper 3.3",
    printed="ascent raises the entropy of attention",
    corrected="dH/dt = -t Var_tη<x,η> <= 0 along tη",
)
def scaling_lowers_the_entropy_of_attention() -> Outcome:
    x, eta, t = _keys(), normal(3, seed=2), number(1.3)
    h = gz.Empirical(x)
    slope = torch.func.grad(lambda s: h.entropy(s * eta))(t)
    variance = (eta * h.covariance_product(t * eta, eta)).sum()
    return Outcome(max(gap(slope, -t * variance), violation(slope, 0 * slope)), float(-slope.clamp(max=0)))


@statement("E15b", "paper 3.3", corrected="the cloud gains log det(I + τ∇²G) >= 0 of differential entropy")
def ascent_raises_the_entropy_of_the_cloud() -> Outcome:
    h, eta, tau = gz.Empirical(_keys()), normal(3, seed=2), 0.8
    jacobian = torch.func.jacrev(lambda e: e + tau * h.mean(e))(eta)
    gain = torch.linalg.slogdet(torch.eye(3, dtype=FLOAT) + tau * h.covariance(eta)).logabsdet
    return Outcome(max(gap(torch.linalg.slogdet(jacobian).logabsdet, gain), violation(-gain, 0 * gain)))


@statement(
    "E16",
    "paper 3.3",
    printed="tokens move away from the origin",
    corrected="|η'|² >= |η|² + τ²|∇G|² if the keys have mean zero",
)
def ascent_moves_outward_from_centred_keys() -> Outcome:
    x, eta, tau = _keys(), 0.1 * normal(200, 3, seed=2), 0.5
    centred, shifted = gz.Empirical(x - x.mean(0)), gz.Empirical(x - x.mean(0) + 2.0)

    def shortfall(h: gz.Measure) -> float:
        m = h.mean(eta)
        return violation((eta**2).sum(-1) + tau**2 * (m**2).sum(-1), ((eta + tau * m) ** 2).sum(-1))

    return Outcome(shortfall(centred), shortfall(shifted))


# Theorem 1 ----------------------------------------------------------------------------------------------------------


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


TAU = 0.7


def _gaussian() -> tuple[Tensor, Tensor]:
    """The moments μ and Σ of h."""
    return normal(3, seed=6), spread(3, seed=7)


def _theorem_1() -> tuple[Tensor, Tensor]:
    """The target moments m* = Σ⁻¹μ and C* = Σ⁻¹ of h = N(μ,Σ)."""
    mu, Sigma = _gaussian()
    C = torch.linalg.inv(Sigma)
    return C @ mu, C


def _ascent(eta: Tensor) -> Tensor:
    """η + τ∇G(η), computed by the library."""
    return eta + TAU * gz.Gaussian(*_gaussian()).mean(eta)


def _ascent_is_affine() -> float:
    """Residual of `_ascent` against (I + τΣ)η + τμ written out."""
    (mu, Sigma), eta = _gaussian(), normal(5, 3, seed=21)
    return gap(_ascent(eta), eta + TAU * (eta @ Sigma) + TAU * mu, 10.0)


def _step(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the image of a distribution under (I + τΣ)η + τμ."""
    mu, Sigma = _gaussian()
    J = torch.eye(3, dtype=FLOAT) + TAU * Sigma
    return J @ mean + TAU * mu, J @ cov @ J.T


@statement(
    "Thm. 1 (i)",
    "paper 3.3, E17",
    corrected="N(Σ⁻¹μ, Σ⁻¹) is fixed in distribution by moment renormalisation after attention",
)
def equilibrium_in_law() -> Outcome:
    m, C = _theorem_1()
    mean, cov = _step(m, C)
    O = torch.linalg.qr(normal(3, 3, seed=9)).Q  # noqa: E741  an arbitrary orthogonal matrix
    W = _power(C, 0.5) @ O @ _power(cov, -0.5)
    law = gz.pushforward(gz.Gaussian(mean, cov), W, m - W @ mean)
    eta = normal(4, 3, seed=3)
    corrected = max(
        gap(law.log_normalizer(eta), eta @ m + ((eta @ C) * eta).sum(-1) / 2, 10.0),
        gap(law.mean(eta), m + eta @ C, 10.0),
        _ascent_is_affine(),
    )
    return Outcome(corrected)


@statement(
    "Thm. 1 (ii, iii)",
    "paper 3.3, E17",
    corrected="with ZCA the step is the identity, on every cloud with these two moments, Gaussian or not",
)
def equilibrium_pointwise() -> Outcome:
    m, C = _theorem_1()
    cloud = torch.rand(40, 3, generator=generator(4), dtype=FLOAT) ** 3  # far from Gaussian
    cloud = (cloud - cloud.mean(0)) @ _power(torch.cov(cloud.T, correction=0), -0.5) @ _power(C, 0.5) + m
    moved = _ascent(cloud)
    # ZCA composes C*^(1/2) C'^(-1/2); all factors are functions of Σ, so the order does not matter.
    whiten = _power(torch.cov(moved.T, correction=0), -0.5) @ _power(C, 0.5)
    return Outcome(max(gap((moved - moved.mean(0)) @ whiten + m, cloud, 10.0), _ascent_is_affine()))


@statement("Thm. 1 (iv)", "paper 3.3, E17", corrected="any target moments are an equilibrium, not only (Σ⁻¹μ, Σ⁻¹)")
def equilibrium_for_any_target() -> Outcome:
    m, C = normal(3, seed=13), spread(3, seed=14)
    corners = torch.cartesian_prod(*(number(-1.0, 1.0),) * 3)  # mean 0 and covariance 1, moved to the target
    moved = _ascent(corners @ _power(C, 0.5) + m)
    cov = torch.cov(moved.T, correction=0)
    back = (moved - moved.mean(0)) @ _power(cov, -0.5) @ _power(C, 0.5) + m
    mean, expected = _step(m, C)
    corrected = max(
        gap(moved.mean(0), mean, 10.0),
        gap(cov, expected, 10.0),
        gap(back.mean(0), m),
        gap(torch.cov(back.T, correction=0), C, 10.0),
    )
    return Outcome(corrected)


@statement(
    "E17",
    "paper 3.3",
    printed="RN may be layer norm",
    corrected="the resolvent (I+τΣ)⁻¹(η - τμ) undoes the step; layer norm does not",
)
def layer_norm_is_no_renormaliser() -> Outcome:
    (m, C), (mu, Sigma) = _theorem_1(), _gaussian()
    cloud = normal(40, 3, seed=4) @ _power(C, 0.5) + m
    moved = _ascent(cloud)
    resolvent = torch.linalg.solve(torch.eye(3, dtype=FLOAT) + TAU * Sigma, (moved - TAU * mu).T).T
    return Outcome(gap(resolvent, cloud, 10.0), gap(layer_norm(moved, (3,)), cloud))
