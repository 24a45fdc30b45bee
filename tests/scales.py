"""Closeness: 1e-12 times the scale of the statement in float64, 1e-5 times it in float32."""

import torch
from torch import Tensor

from gradlogz import Measure

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def close(actual: Tensor, expected: Tensor, scale: Tensor | float = 1.0, *, tolerance: float | None = None) -> None:
    """|actual - expected| <= tolerance * scale everywhere; equal infinities are close, NaN never is."""
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    error = (actual - expected).abs().masked_fill(actual == expected, 0.0)
    allowed = (TOLERANCE[actual.dtype] if tolerance is None else tolerance) * torch.as_tensor(scale)
    ratio = error / allowed
    assert bool((error <= allowed).all()), f"error {float(error.max()):.3g}, {float(ratio.max()):.3g} times the allowed"


def size(measure: Measure, eta: Tensor) -> Tensor:
    """How large x is, at eta and at 0: what a mean is measured by."""
    sizes = []
    for e in (eta, torch.zeros_like(eta)):
        spread = measure.covariance(e).diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()
        sizes.append(measure.mean(e).norm(dim=-1) + spread)
    return torch.stack(sizes).amax()


def scale_of(measure: Measure, eta: Tensor, order: int = 1) -> Tensor:
    """(1 + max|logit|) max|x|^order: of a log normaliser (0), a mean (1), a covariance (2), a third cumulant (3)."""
    x = size(measure, eta)
    return (1 + eta.norm(dim=-1).amax() * x) * x**order
