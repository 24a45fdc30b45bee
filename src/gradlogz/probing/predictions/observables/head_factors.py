"""Factors of the OV matrix and of the transposed QK matrix of every head, on the same side of all norms.

    A = value output,  B = key queryᵀ        update sum_j a_j x_j A,  gradient of the log normaliser sum_j a_j x_j B
    cosine            <A, B> / |A| |B|                               from d x d products: no D x D matrix is formed
    positive cosine   |B₊| / |B|,  B₊ the positive semidefinite part of (B + Bᵀ)/2

Read next: ../tie.py and ../pair_energy.py, which use them.
"""

from typing import NamedTuple

import torch

from ...._typing import Float, Tensor
from ...inside.head_weights import HeadWeights, centred
from ...prediction import Probed


class Factors(NamedTuple):
    """Factors of the OV matrix (value output) and of the transposed QK matrix (key queryᵀ) of every head.

    value, key: act on the inputs of the layer. width: dimension of the space of updates.
    """

    value: Float[Tensor, "h D v"]
    key: Float[Tensor, "h D d"]
    output: Float[Tensor, "h v D"]
    query: Float[Tensor, "h D d"]
    width: int


def factors_of(model: Probed, layer: str) -> Factors | None:
    """Factors of both matrices of a layer on its inputs; None if it has none."""
    weights, sublayer = model.weights.get(layer), model.architecture.branch_of(layer)
    # With normalised queries and keys the gradient is no linear map of the tokens.
    if not isinstance(weights, HeadWeights) or weights.output is None or weights.normalized or sublayer is None:
        return None
    query, output = weights.query, weights.output
    if sublayer.reads is not None:
        query = sublayer.reads.gain.unsqueeze(-1) * query
    if sublayer.closes is not None:
        output = (centred(output, -1) if sublayer.closes.centres else output) * sublayer.closes.gain
    norm = sublayer.reads or sublayer.follows  # the norm that reads the update
    if norm is not None and norm.centres:
        query, output = centred(query, -2), centred(output, -1)
    width = model.architecture.width - (norm is not None and norm.centres)
    return Factors(weights.value, weights.key, output, query, width)


def folded(factors: Factors, model: Probed, layer: str) -> Factors:
    """Factors on normalised tokens: with the gain of the norm before the layer."""
    norm = model.weights[layer].norm  # type: ignore[union-attr]
    if norm is None:
        return factors
    value, key = norm.gain.unsqueeze(-1) * factors.value, norm.gain.unsqueeze(-1) * factors.key
    if norm.centres:
        value, key = centred(value, -2), centred(key, -2)
    return factors._replace(value=value, key=key)


class Moments(NamedTuple):
    """W_vᵀ C W_k, W_vᵀ C W_v and W_kᵀ C W_k of every head, for the second moment C of its tokens."""

    across: Float[Tensor, "*r h v d"]
    value: Float[Tensor, "*r h v v"]
    key: Float[Tensor, "*r h d d"]


def of_unit_tokens(f: Factors) -> Moments:
    """Moments for C = I."""
    return Moments(f.value.mT @ f.key, f.value.mT @ f.value, f.key.mT @ f.key)


def products(
    f: Factors, moments: Moments | None = None, *, turned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """<A, B>, |A|², |B|², [..., h], weighted by the second moment of the tokens; C = I if moments are None.

    turned: right factor of the query, [..., h, d, d].
    """
    moments = of_unit_tokens(f) if moments is None else moments
    across, square = f.output @ f.query, f.query.mT @ f.query
    if turned is not None:
        across, square = across @ turned, turned.mT @ square @ turned
    parts = (moments.across * across, moments.value * (f.output @ f.output.mT), moments.key * square)
    return parts[0].sum((-2, -1)), parts[1].sum((-2, -1)), parts[2].sum((-2, -1))


def cosine(inner: Tensor, square_a: Tensor, square_b: Tensor) -> Tensor:
    """Cosine of two matrices, from their inner product and squared norms."""
    return inner / (square_a * square_b).sqrt()


def positive_cosine(f: Factors) -> Float[Tensor, " h"]:
    """Cosine of B with its positive semidefinite part, from the basis of its factors."""
    d = f.query.shape[-1]
    R = torch.linalg.qr(torch.cat((f.query, f.key), -1)).R
    B = R[..., :d] @ R[..., d:].mT
    positive = torch.linalg.eigvalsh((B + B.mT) / 2).clamp(min=0.0)
    return positive.square().sum(-1).sqrt() / B.square().sum((-2, -1)).sqrt()
