"""Convex duality: from means to natural parameters.

    G*(u)     = sup_eta <eta, u> - G(eta)                           [shim22, Eq. 6]
    ∇G*(u)    = eta with ∇G(eta) = u                                the canonical link
    ∇²G*(u)   = ∇²G(eta)⁻¹
    G*(u)     = KL(P_eta‖h) = min { KL(q‖h) : E_q x = u }           maximum entropy
    B_f(a, b) = f(a) - f(b) - <∇f(b), a - b>
    KL(p‖q)   = B_G(eta_q, eta_p) = B_G*(u_p, u_q)                  [theory E8]

The supremum is found by Newton's method on the convex function G(eta) - <eta, u>, safeguarded by step halving. A mean
outside the closed hull of the support has G* = +inf, and the support function proves it: a direction d with
<d, u> > sup <d, x>.

Read next: measure.py (kl, relative_entropy), algebra.py (tilt, the measure at eta).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._errors import InputRuntimeError, InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Tensor
from ..special.pseudo_inverse import null_vectors, projector, pseudo_inverse
from .algebra import tilt
from .measure import Measure, check_measures
from .validation import arrange

HALVINGS = 64  # halvings of a Newton step at most: from a nearly flat point it may be 1e17 too long
GAIN = 0.25  # required share of the decrease in the quadratic model; less would accept steps to where G is flat


class Dual(NamedTuple):
    """The convex conjugate at a mean, with its certificates."""

    value: Float[Tensor, "*bm"]
    eta: Float[Tensor, "*bm d"]
    gap: Float[Tensor, "*bm"]
    converged: Bool[Tensor, "*bm"]
    steps: int
    separating: Float[Tensor, "*bm d"]


class MaximumEntropy(NamedTuple):
    """The distribution closest to h with a given mean: itself, its natural parameter and its relative entropy."""

    distribution: Measure
    eta: Float[Tensor, "*b d"]
    relative_entropy: Float[Tensor, "*b"]


def dual(
    h: Measure,
    mean: Float[Tensor, "*bm d"],
    *,
    tolerance: float = 1e-12,
    max_iterations: int = 100,
    throw: bool = True,
) -> Dual:
    """G*(u) = sup_eta <eta, u> - G(eta), the convex conjugate of the log normaliser, at u = mean.

    Args:
        tolerance: tolerance of the gap, relative to 1 + |value|; in float32 at least its rounding error.
        throw: raise if a row neither converged nor was shown to lie outside. With False, check `converged`.

    Returns:
        value: G*(u); +inf where u is outside the closed hull of the support.
        eta: the link, ∇G(eta) = u, orthogonal to directions in which h does not extend.
        gap: bound on the supremum minus value. The measure P_eta (1 + <F⁺r, x - m>), r = u - m the residual, has
            mean u, so its entropy bounds G* from above; gap = <r, F⁺r> is a proof wherever that measure is nonnegative.
            Elsewhere (rows not converged, unbounded supports) it is the Newton estimate of the same quantity.
        converged: True if the gap is below the tolerance, or u was shown to lie outside.
        separating: a unit direction d with <d, u> > sup <d, x> where u lies outside, 0 elsewhere.

    On the boundary of the hull the supremum is approached as eta goes to infinity: if the boundary has mass, value is
    correct within gap; otherwise the row does not converge.
    Differentiable once in eta and twice in value (∇G* = eta, ∇²G* = F⁻¹), with respect to mean and to h.
    Cost: one covariance and one d x d eigendecomposition per row and step; 5 to 15 steps are usual.
    Law: tests/laws/test_the_dual_inverts_the_mean.py.

    >>> import torch
    >>> from gradlogz import Empirical
    >>> h, eta = Empirical(torch.randn(9, 3, dtype=torch.float64)), torch.randn(3, dtype=torch.float64)
    >>> torch.allclose(dual(h, h.mean(eta)).eta, eta)
    True
    """
    check_measures("dual", h=h)
    (u,), restore = arrange(h, "dual", mean=mean)
    with torch.no_grad():
        search = _newton(h, u.detach(), tolerance, max_iterations)
    if throw and not bool(search.converged.all()):
        unfinished = f"{int((~search.converged).sum())} of {search.converged.numel()} rows"
        problem = f"{unfinished} have a gap above {tolerance:g} after max_iterations={max_iterations} steps"
        remedy = "Increase max_iterations, or pass throw=False if means may lie on the boundary of the hull."
        raise InputRuntimeError("dual", "max_iterations", problem, remedy)

    # A Newton step of value 0 whose derivative is that of the implicit function u -> eta.
    outside = (search.separating != 0).any(-1, keepdim=True)
    step = _times(search.inverse, u - h.mean(search.eta))
    eta = search.eta + torch.where(search.converged.unsqueeze(-1) & ~outside, step - step.detach(), 0.0)
    value = (eta * u).sum(-1) - h.log_normalizer(eta)
    value = torch.where(outside.squeeze(-1), torch.inf, value)
    return Dual(
        restore(value, 0),
        restore(eta, 1),
        restore(search.gap, 0),
        restore(search.converged, 0),
        search.steps,
        restore(search.separating, 1),
    )


def mean_to_natural(
    h: Measure, mean: Float[Tensor, "*bm d"], *, tolerance: float = 1e-12, max_iterations: int = 100
) -> Tensor:
    """Canonical link: the natural parameter eta with ∇G(eta) = mean.   [theory 3.6]

    The inverse of `h.mean`, up to directions in which h does not extend. Raises for a mean outside the hull.
    """
    result = dual(h, mean, tolerance=tolerance, max_iterations=max_iterations)
    outside = int((result.separating != 0).any(-1).sum())
    if outside:
        fact = f"{outside} of {result.converged.numel()} rows are outside"
        remedy = "See dual(h, mean).separating for a direction that proves it."
        raise InputValueError(
            "mean_to_natural", "mean", f"mean must lie inside the hull of the support, but {fact}", remedy
        )
    return result.eta


def bregman(
    convex: Callable[[Tensor], Tensor], a: Float[Tensor, "*bm d"], b: Float[Tensor, "*bm d"]
) -> Float[Tensor, "*bm"]:
    """B_f(a, b) = f(a) - f(b) - <∇f(b), a - b>, for any convex f from [..., d] to [...].

    For f = h.log_normalizer it is KL(P_b‖P_a), in this order: B_G(eta_q, eta_p) = KL(p‖q).   [theory E8]

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> h, p, q = Gaussian.diagonal(torch.ones(2), torch.ones(2)), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
    >>> torch.equal(bregman(h.log_normalizer, q, p), h.kl(p, q))
    True
    """
    check_floats("bregman", a=a, b=b)
    if a.shape != b.shape:
        fact = f"shapes {shape_of(a)} and {shape_of(b)}"
        raise InputValueError("bregman", "a", f"a and b must have one shape, got {fact}", "Expand them to one shape.")
    gradient = torch.func.grad(lambda x: convex(x).sum())(b)
    return convex(a) - convex(b) - (gradient * (a - b)).sum(-1)


def moment_project(
    family: Measure,
    source: Measure,
    eta: Float[Tensor, "*bm d"],
    *,
    statistic: Callable[[Tensor], Tensor] | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Natural parameter of the family member nearest to P, argmin KL(P‖.): the one with the same expected statistic.

    It is the M-projection of the filters: average the moments, then apply the link.   [theory 7.5]

    Args:
        family: the measure whose natural parameter is returned.
        source: the measure that generates P.
        eta: the natural parameter of P = P_eta.
        statistic: T, from [..., d] to the space of the family; by default the identity. For a family built by
            from_distribution(Normal(...)) it is y -> (y, y²).
        samples: number of draws to average T over, required unless source has finitely many points.
    """
    if statistic is None:
        return mean_to_natural(family, source.mean(eta))
    return mean_to_natural(family, source.expect(statistic, eta, samples=samples, generator=generator))


def maximum_entropy(h: Measure, mean: Float[Tensor, "*b d"]) -> MaximumEntropy:
    """Distribution of least KL(.‖h) with this mean, which is a member of the family generated by h.   [theory 3.5]

    For any q with the same mean, KL(q‖h) = KL(q‖distribution) + relative_entropy.
    """
    check_measures("maximum_entropy", h=h)
    check_floats("maximum_entropy", mean=mean)
    if mean.ndim != len(h.batch_shape) + 1:
        condition = f"mean must be [*b, d={h.dim}], one for each measure"
        remedy = "For several means of one measure use dual."
        raise InputValueError("maximum_entropy", "mean", f"{condition}, got shape {shape_of(mean)}", remedy)
    eta = mean_to_natural(h, mean)
    return MaximumEntropy(tilt(h, eta), eta, h.relative_entropy(eta))


class _Search(NamedTuple):
    eta: Tensor
    gap: Tensor
    converged: Tensor
    steps: int
    separating: Tensor
    inverse: Tensor


def _newton(h: Measure, u: Tensor, tolerance: float, max_iterations: int) -> _Search:
    """Minimise G(eta) - <eta, u> over all rows [*b, m, d] at once; finished rows are not changed."""
    eps = torch.finfo(u.dtype).eps
    tolerance = max(tolerance, 16 * eps)
    eta, separating = torch.zeros_like(u), torch.zeros_like(u)
    gap = torch.full(u.shape[:-1], torch.inf, dtype=u.dtype, device=u.device)
    done = torch.zeros_like(gap, dtype=torch.bool)
    stuck = torch.zeros_like(done)  # rows for which no step length decreases the objective
    objective = h.log_normalizer(eta)
    null = null_vectors(h.covariance(eta))  # directions in which h does not extend, the same for every eta
    within = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device) - projector(null)
    inverse = torch.zeros_like(within)
    steps = 0
    while True:
        # Gradient, Hessian and decrement -----------------------------------------------------------------------------
        m, F = h.mean(eta), h.covariance(eta)
        residual = u - m
        inward = _times(within, residual)
        inverse = torch.where(done[..., None, None], inverse, pseudo_inverse(F, null))
        step = _times(inverse, residual)
        decrement = (residual * step).sum(-1)
        rounding = 64 * eps * u.shape[-1] * (u.norm(dim=-1) + m.norm(dim=-1))

        # The decrement is valid only if the residual is in the range of F: where eta has diverged and F has
        # underflowed, step and decrement are 0 without convergence.
        known = (inward - _times(F, step)).norm(dim=-1) <= 0.01 * inward.norm(dim=-1)
        known = known | (inward.norm(dim=-1) <= rounding)
        known = known & ((residual - inward).norm(dim=-1) <= rounding + 64 * eps * u.shape[-1] * _extent(F))
        gap = torch.where(done, gap, torch.where(known, decrement, torch.inf))

        # A direction in which u lies beyond the support proves that u is outside the hull. ----------------------------
        for direction in (residual - inward, residual, eta):
            length = direction.norm(dim=-1)
            d = direction / length.unsqueeze(-1).clamp(min=torch.finfo(u.dtype).tiny)
            reach = h.support(d)
            slack = rounding + 64 * eps * u.shape[-1] * reach.abs().nan_to_num(0.0, 0.0, 0.0)
            beyond = ((d * u).sum(-1) - reach > slack) & (length > slack) & ~done
            separating = torch.where(beyond.unsqueeze(-1), d, separating)
            gap = torch.where(beyond, torch.inf, gap)
            done = done | beyond

        product, G = (eta * u).sum(-1), h.log_normalizer(eta)
        value = product - G
        digits = (
            eps**0.5 * (product.abs() + G.abs()) <= 1 + value.abs()
        )  # half of the digits are left; far outside none are
        done = done | ((gap <= tolerance * (1 + value.abs())) & digits)
        if bool((done | stuck).all()) or steps == max_iterations:
            # The search ends within sqrt(tolerance) of the optimum: one more full step, if it brings the mean closer.
            trial = torch.where((done & (separating == 0).all(-1)).unsqueeze(-1), eta + step, eta)
            trial = torch.where(h.in_domain(trial).unsqueeze(-1), trial, eta)
            closer = (u - h.mean(trial)).norm(dim=-1, keepdim=True) < residual.norm(dim=-1, keepdim=True)
            eta = torch.where(closer, trial, eta)
            inverse = torch.where(closer.unsqueeze(-1), pseudo_inverse(h.covariance(eta), null), inverse)
            return _Search(eta, gap, done, steps, separating, inverse)

        steps += 1
        resting = done | stuck
        eta, objective, descended = _descended(h, u, eta, step, objective, decrement, resting)
        stuck = stuck | ~(descended | resting)


def _descended(
    h: Measure, u: Tensor, eta: Tensor, step: Tensor, objective: Tensor, decrement: Tensor, resting: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve the step until it is in the domain and decreases the objective sufficiently (Armijo).

    Returns the new point, its objective, and the rows that moved; those that rest or find no length stay.
    """
    size = torch.where(resting, 0.0, 1.0).to(u.dtype)
    noise = 4 * torch.finfo(u.dtype).eps * (objective.abs() + (eta * u).sum(-1).abs())
    for _ in range(HALVINGS):
        trial = eta + size.unsqueeze(-1) * step
        finite = torch.isfinite(trial).all(-1, keepdim=True)
        legal = h.in_domain(torch.where(finite, trial, eta)) & finite.squeeze(-1)
        trial = torch.where(legal.unsqueeze(-1), trial, eta)
        lower = h.log_normalizer(trial) - (trial * u).sum(-1)
        good = resting | (legal & (lower <= objective - GAIN * size * decrement + noise))
        if bool(good.all()):
            break
        size = torch.where(good, size, size / 2)
    moved = good & ~resting
    return torch.where(moved.unsqueeze(-1), trial, eta), torch.where(moved, lower, objective), moved


def _extent(F: Tensor) -> Tensor:
    """Largest standard deviation of a coordinate."""
    return F.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=0).sqrt()


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
