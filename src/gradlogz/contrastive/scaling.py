"""Multidimensional scaling: squared distances and dot products of centred points are the same thing.

    D_ij       = |x_i - x_j|²  = |x_i|² + |x_j|² - 2 <x_i, x_j>
    -J D J / 2 = X_c X_c^T,      J = I - 1 1^T / n                         double centring                       [cox00]
    X_c        = V Λ^{1/2} up to a rotation, where -J D J / 2 = V Λ V^T     classical scaling

So a model of distances is one of dot products: exp(-|x_i - x_j|²) and exp(2 <x_i, x_j> - |x_j|²) have the same softmax
over j, attention with a key bias (`nca` in losses/).

Read next: losses/ (losses of dot products).
"""

from typing import NamedTuple

import torch

from .._errors import InputValueError, shape_of
from .._typing import Float, Tensor
from .validation import FLOATS


class ClassicalScaling(NamedTuple):
    """Points whose squared distances approximate the given ones.

    Attributes:
        points: centred, their axes ordered by decreasing variance; the principal components of the points if the
            distances are Euclidean.
        eigenvalues: all eigenvalues of the doubly centred matrix, decreasing. Distances are Euclidean if and only if
            none is negative.
    """

    points: Float[Tensor, "*b n k"]
    eigenvalues: Float[Tensor, "*b n"]


def double_centring(squared_distances: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Dot products <x_i - mean, x_j - mean> of points, from their squared distances: -J D J / 2.

    >>> import torch
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> centred = x - x.mean(0)
    >>> torch.allclose(double_centring(torch.cdist(x, x).square()), centred @ centred.mT)
    True
    """
    _check("double_centring", squared_distances)
    rows = squared_distances - squared_distances.mean(-1, keepdim=True)
    return (rows - rows.mean(-2, keepdim=True)) / -2


def classical_scaling(squared_distances: Float[Tensor, "*b n n"], dim: int) -> ClassicalScaling:
    """Points in `dim` dimensions from squared distances, by the largest eigenvalues of the doubly centred matrix.

    Exact for Euclidean distances of points in at most `dim` dimensions; otherwise the best approximation of the dot
    products in least squares. Cost: an eigendecomposition, n³. Law: tests/laws/test_distances_are_dot_products.py.
    """
    gram = double_centring(squared_distances)
    n = gram.shape[-1]
    if not 1 <= dim <= n:
        remedy = "Points in general position need n - 1 dimensions at most."
        raise InputValueError("classical_scaling", "dim", f"dim must be from 1 to {n}, got {dim}", remedy)
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    values, vectors = values.flip(-1), vectors.flip(-1)
    points = vectors[..., :dim] * values[..., :dim].clamp(min=0).sqrt().unsqueeze(-2)
    return ClassicalScaling(points, values)


def _check(call: str, squared_distances: Tensor) -> None:
    D = squared_distances
    if D.dtype not in FLOATS or D.ndim < 2 or D.shape[-1] != D.shape[-2] or D.shape[-1] == 0:
        condition = "squared_distances must be a floating tensor [*b, n, n]"
        remedy = "Pass torch.cdist(x, x).square() for points x."
        raise InputValueError(call, "squared_distances", f"{condition}, got {D.dtype} of shape {shape_of(D)}", remedy)
