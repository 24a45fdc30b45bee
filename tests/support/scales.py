"""Tolerances: 1e-12 times the scale of a statement in float64, 1e-5 times it in float32."""

import functools

import torch
from torch import Tensor

from gradlogz import Measure

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def close(actual: Tensor, expected: Tensor, scale: Tensor | float = 1.0, *, tolerance: float | None = None) -> None:
    """Assert |actual - expected| <= tolerance * scale everywhere; equal infinities are close, NaN never is."""
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    error = (actual - expected).abs().masked_fill(actual == expected, 0.0)
    allowed = (TOLERANCE[actual.dtype] if tolerance is None else tolerance) * torch.as_tensor(scale)
    ratio = error / allowed
    assert bool((error <= allowed).all()), f"error {float(error.max()):.3g}, {float(ratio.max()):.3g} times the allowed"


@functools.lru_cache(maxsize=4)  # a law asks for several orders of one measure in a row
def size(measure: Measure, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the size and the spread of x, the maximum over eta and 0, from derivatives of the log normaliser.

    The mean and covariance of the measure are not used, since they are under test.
    """

    def gradient(e: Tensor) -> Tensor:
        return torch.func.grad(lambda x: measure.log_normalizer(x).sum())(e)

    means, spreads = [], []
    basis = torch.eye(measure.dim, dtype=eta.dtype)
    for e in (eta, torch.zeros_like(eta)):
        means.append(gradient(e).norm(dim=-1).amax())
        along = torch.func.vmap(lambda b, e=e: torch.func.jvp(gradient, (e,), (b.expand(e.shape),))[1] @ b)
        spreads.append(along(basis).clamp(min=0).sum(0).sqrt().amax())
    return torch.stack(means).amax() + torch.stack(spreads).amax(), torch.stack(spreads).amax()


def scale_of(measure: Measure, eta: Tensor, order: int = 1) -> Tensor:
    """Return (1 + max|logit|) max|x|^order: log normaliser (0), mean (1), covariance (2), third cumulant (3).

    Central moments do not depend on the location of x. From order 2 on |x| is therefore the spread, plus the rounding
    error of an offset: the points themselves are rounded to 1e-16 of their size.
    """
    x, spread = size(measure, eta)
    if order < 2:
        return (1 + eta.norm(dim=-1).amax() * x) * x**order
    return (1 + eta.norm(dim=-1).amax() * spread) * (spread + 1e-3 * x) ** order
