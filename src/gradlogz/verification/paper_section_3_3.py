"""Statements of section 3.3 of the paper: expansion, contraction, Theorem 1 and its scope.   [theory 4.1-4.3, E14-E17]

Read next: dynamics_statements.py (clouds in general), draft_note_1.py (the first draft note).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import dynamics as dyn
from .. import measures as gz
from .._typing import Tensor
from ..dynamics.contraction import BatchNorm, LayerNorm, Scalar, Whitening
from .definition import FLOAT, gaussian_nodes, generator, normal, number, power, softmax_average, spread
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
    corrected="along the ascent dH = -η^T F ∇G, of either sign; under scaling dH/dt = -t Var<x,η> <= 0",
)
def ascent_and_the_entropy_of_attention() -> Outcome:
    def along(keys: Tensor, eta: Tensor) -> tuple[Tensor, float]:
        """Slope of the entropy along the ascent, and its residual against -η^T F ∇G by sums."""
        h, p = gz.Empirical(keys), torch.softmax(keys @ eta, 0)
        mean = p @ keys
        F = ((keys - mean).T * p) @ (keys - mean)
        slope = torch.func.jvp(h.entropy, (eta,), (h.mean(eta),))[1]
        return slope, gap(slope, -eta @ F @ mean, 10.0)

    x, eta, t = _keys(), normal(3, seed=2), number(1.3)
    _, anywhere = along(x, eta)
    cross = torch.cat((torch.eye(2, dtype=FLOAT), -torch.eye(2, dtype=FLOAT)))
    falls, one = along(cross, number(1.0, 0.5))
    # <x_a,x_b> > |x_a|²: the step towards the winner a moves mass to the runner-up b.
    rises, other = along(number(1.0, 0.0, 2.0, -3.0).reshape(2, 2), number(3.0, 2.0))
    scaled = torch.func.grad(lambda s: gz.Empirical(x).entropy(s * eta))(t)
    p = torch.softmax(t * x @ eta, 0)
    variance = p @ (x @ eta) ** 2 - (p @ x @ eta) ** 2
    signs = float("inf") if falls >= 0 or rises <= 0 else 0.0
    return Outcome(max(anywhere, one, other, signs, gap(scaled, -t * variance, 10.0)), float(-falls))


@statement("E15b", "paper 3.3", corrected="the cloud gains log det(I + τ∇²G) >= 0 of differential entropy")
def ascent_raises_the_entropy_of_the_cloud() -> Outcome:
    x, eta, tau = _keys(), normal(3, seed=2), 0.8
    jacobian = torch.func.jacrev(lambda e: e + tau * gz.Empirical(x).mean(e))(eta)
    F = torch.func.hessian(lambda e: (x @ e).exp().sum().log())(eta)
    gain = torch.linalg.slogdet(torch.eye(3, dtype=FLOAT) + tau * F).logabsdet
    return Outcome(max(gap(torch.linalg.slogdet(jacobian).logabsdet, gain), violation(-gain, 0 * gain)))


@statement(
    "E16",
    "paper 3.3",
    printed="tokens move away from the origin",
    corrected="|η'|² >= |η|² + τ²|∇G|² if the keys have mean zero",
)
def ascent_moves_outward_from_centred_keys() -> Outcome:
    x, eta, tau = _keys(), 0.1 * normal(200, 3, seed=2), 0.5
    centred, shifted = x - x.mean(0), x - x.mean(0) + 2.0

    def shortfall(keys: Tensor) -> float:
        after, m = dyn.evolve(eta, dyn.Ascent(tau=tau, keys=keys), steps=1).cloud, softmax_average(eta, keys)
        return violation((eta**2).sum(-1) + tau**2 * (m**2).sum(-1), (after**2).sum(-1))

    return Outcome(shortfall(centred), shortfall(shifted))


# Theorem 1 ----------------------------------------------------------------------------------------------------------

TAU = 0.7


class _Theorem1(NamedTuple):
    """The measure h = N(μ,Σ) in the plane and the target moments m* = Σ⁻¹μ, C* = Σ⁻¹."""

    mu: Tensor
    Sigma: Tensor
    m: Tensor
    C: Tensor

    def step(self, cloud: Tensor, contraction: Callable[[Tensor], Tensor]) -> Tensor:
        """One step of `evolve` with h as frozen keys, and a contraction.

        The keys are quadrature nodes of h. A third coordinate, 1 in tokens and log w in keys, adds the weights w of the
        nodes to the logits; the value matrix removes it.
        """
        nodes = gaussian_nodes(self.mu, self.Sigma)
        keys = torch.cat((nodes.points, nodes.log_masses.unsqueeze(-1)), -1)
        tokens = torch.cat((cloud, torch.ones(len(cloud), 1, dtype=FLOAT)), -1)
        ascent = dyn.Ascent(tau=TAU, keys=keys, W_v=number(1.0, 1.0, 0.0).diag())

        def contracted(y: Tensor) -> Tensor:
            return torch.cat((contraction(y[:, :2]), y[:, 2:]), -1)

        return dyn.evolve(tokens, ascent, contraction=contracted, steps=1).cloud[:, :2]


def _theorem_1() -> _Theorem1:
    mu, Sigma = normal(2, seed=6), spread(2, seed=7)
    C = torch.linalg.inv(Sigma)
    C = (C + C.T) / 2
    return _Theorem1(mu, Sigma, C @ mu, C)


def _skewed(mean: Tensor, covariance: Tensor) -> Tensor:
    """Forty tokens with these two moments, far from Gaussian."""
    cloud = torch.rand(40, 2, generator=generator(4), dtype=FLOAT) ** 3
    return (cloud - cloud.mean(0)) @ power(torch.cov(cloud.T, correction=0), -0.5) @ power(covariance, 0.5) + mean


@statement(
    "Thm. 1 (i)",
    "paper 3.3, E17",
    corrected="N(Σ⁻¹μ, Σ⁻¹) is fixed in distribution by moment renormalisation after attention",
)
def equilibrium_in_law() -> Outcome:
    """With B = Σ the keys Σx of the cloud have the distribution h: the equilibrium keeps its own keys."""
    mu, Sigma, m, C = _theorem_1()
    cloud, ascent = dyn.GaussianCloud(m, C), dyn.Ascent(tau=TAU, B=Sigma)
    J = torch.eye(2, dtype=FLOAT) + TAU * Sigma  # the step is Jη + τμ
    moved = cloud.evolve(ascent)
    worst = max(gap(moved.mean, J @ m + TAU * mu, 10.0), gap(moved.covariance, J @ C @ J.T, 10.0))
    for kind in ("zca", "monge", "pca", "cholesky"):
        after = cloud.evolve(ascent, contraction=Whitening(kind, m, C), steps=3)
        worst = max(worst, gap(after.mean, m, 10.0), gap(after.covariance, C, 10.0))
    return Outcome(worst)


@statement(
    "Thm. 1 (ii, iii)",
    "paper 3.3, E17",
    corrected="with ZCA or the Monge map the step is the identity on every cloud with these moments, Gaussian or not",
)
def equilibrium_pointwise() -> Outcome:
    one = _theorem_1()
    cloud = _skewed(one.m, one.C)
    kinds = ("zca", "monge")
    return Outcome(max(gap(one.step(cloud, Whitening(kind, one.m, one.C)), cloud, 10.0) for kind in kinds))  # type: ignore[arg-type]


@statement("Thm. 1 (iv)", "paper 3.3, E17", corrected="any target moments are an equilibrium, not only (Σ⁻¹μ, Σ⁻¹)")
def equilibrium_for_any_target() -> Outcome:
    """The step on a cloud with the target moments is affine, m + L(η - m), and fixes N(m,C): L C L^T = C."""
    one, m, C = _theorem_1(), normal(2, seed=13), spread(2, seed=14)
    cloud, worst = _skewed(m, C), 0.0
    for kind in ("zca", "monge", "pca", "cholesky"):
        after = one.step(cloud, Whitening(kind, m, C))
        L = torch.linalg.lstsq(cloud - m, after - m).solution.T
        worst = max(worst, gap((cloud - m) @ L.T, after - m, 10.0), gap(L @ C @ L.T, C, 10.0))
    return Outcome(worst)


@statement(
    "4.2",
    "paper 3.3",
    corrected="(Σ⁻¹μ, Σ⁻¹) are the moments of η for which the keys Ση have the distribution h = N(μ,Σ)",
)
def keys_of_the_equilibrium() -> Outcome:
    (mu, Sigma, m, C), eta = _theorem_1(), normal(4, 2, seed=3)
    keys = gz.pushforward(gz.Gaussian(m, C), Sigma)
    return Outcome(max(gap(keys.mean(eta), mu + eta @ Sigma, 10.0), gap(keys.covariance(eta[0]), Sigma, 10.0)))


@statement(
    "4.3",
    "paper 3.3",
    corrected="batch norm serves if Σ is diagonal, one scalar if Σ = c I; after each of them the step is the identity",
)
def other_normalisers() -> Outcome:
    mu, worst = normal(2, seed=6), 0.0
    for contraction, variances in ((BatchNorm(), number(0.5, 1.7)), (Scalar(), number(1.3, 1.3))):
        one = _Theorem1(mu, variances.diag(), mu / variances, (1 / variances).diag())
        cloud = _skewed(one.m, one.C)

        def renormalised(y: Tensor) -> Tensor:
            return one.m + contraction(y) / variances.sqrt()  # noqa: B023  called in this round only

        worst = max(worst, gap(one.step(cloud, renormalised), cloud, 10.0))
    return Outcome(worst)


@statement(
    "E17",
    "paper 3.3",
    printed="RN may be layer norm",
    corrected="the map (I+τΣ)⁻¹(η - τμ) undoes the step; layer norm does not",
)
def layer_norm_is_no_renormaliser() -> Outcome:
    one = _theorem_1()
    cloud = _skewed(one.m, one.C)
    J = torch.eye(2, dtype=FLOAT) + TAU * one.Sigma

    def undone(y: Tensor) -> Tensor:
        return torch.linalg.solve(J, (y - TAU * one.mu).T).T

    return Outcome(gap(one.step(cloud, undone), cloud, 10.0), gap(one.step(cloud, LayerNorm()), cloud))
