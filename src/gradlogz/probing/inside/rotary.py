"""Rotary embeddings: queries and keys rotated by their positions.

    q_i    = x W_q R(i),   k_j = y W_k R(j)         R(p): rotation of coordinate pairs by p times their angles   [su21]
    logit  = beta x W_q R(i - j) W_kᵀ yᵀ            one QK matrix for each distance i - j
    R̄      = sum_d w(d) R(d)                        w(d): attention weight of a head on keys at distance d
    W_q R̄ W_kᵀ                                      QK matrix of a head, averaged over the distances it attends to

The pairs and angles of a layer are measured by re-projecting one token at many positions of a window. Two coordinates
are a pair if one gains in square what the other loses. The angle is estimated at distance 1 and refined at distances 2,
4, 8, ... The rotations are then verified at all these positions and in a window of another length. A layer that fails,
for example because its angles depend on the length or on positions in an image, has no averaged QK matrix.

Read next: ../predictions/observables/attention_distance.py (the weights w), weights.py (the caller),
../predictions/qk_geometry.py.
"""

import math

import torch

from ..._typing import Float, Int, Tensor
from .events import LayerCall
from .head_weights import Turning
from .reprojection import call_on

DRAWS = 4  # number of random tokens that are re-projected
MOVED = 16.0  # change of a rotated coordinate, at least, in units of rounding
OPPOSED = 0.9  # minus the cosine between the gains in square of the two coordinates of a pair, at least


def turning_of(layer_call: LayerCall, other: LayerCall, *, layers: str, rounding: float) -> Turning | str:
    """Return the rotations of a layer's queries and keys, verified in two windows of different lengths, or why not."""
    unit = torch.finfo(layer_call.tokens.dtype).eps
    window, small = _rotated(layer_call, layers), _rotated(other, layers)
    if window is None or small is None:
        return "it computes its own logits"
    vectors, places = window
    turning = _pairs(vectors, places, MOVED * max(unit, torch.finfo(torch.float32).eps))
    if turning is None:
        return "its rotations do not act on pairs of coordinates"
    if turning.error(vectors, places) > rounding:
        return "its rotation angles are not proportional to the distance"
    if turning.error(*small) > rounding:
        return "its rotations depend on the sequence length"
    return turning


def _rotated(layer_call: LayerCall, layers: str) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys [t, p, d] of a few tokens at many positions of the window, and the positions [p]."""
    n, width = layer_call.tokens.shape[1:]
    places = torch.tensor(sorted({0, n - 1, *(2**k for k in range(max(n - 1, 1).bit_length()) if 2**k < n)}))
    tokens = torch.randn(DRAWS, width, generator=torch.Generator().manual_seed(0)).to(layer_call.tokens)
    vectors = []
    for token in tokens:
        call = call_on(layer_call, token.expand_as(layer_call.tokens).contiguous(), layers=layers)
        if call is None:
            return None
        vectors += [t[0, :, places].double().cpu() for t in (call.query, call.key)]
    return torch.cat(vectors), places


def _pairs(vectors: Float[Tensor, "t p d"], places: Int[Tensor, " p"], moved: float) -> Turning | None:
    """Return the rotated pairs of coordinates and their angles; None if the changing coordinates do not form pairs."""
    first = vectors[:, :1]
    turns = (vectors - first).abs().amax((0, 1)) > moved * vectors.abs().max()
    gains = (vectors.square() - first.square()).flatten(0, 1)
    gains = gains / gains.norm(dim=0).clamp(min=torch.finfo(gains.dtype).tiny)
    cosines = gains.mT @ gains
    cosines.fill_diagonal_(0.0)
    opposite, partner = cosines.min(-1)
    pairs = []
    for one in turns.nonzero().squeeze(-1).tolist():
        two = int(partner[one])
        if float(opposite[one]) > -OPPOSED or (bool(turns[two]) and int(partner[two]) != one):
            return None
        if one < two or not bool(turns[two]):
            pairs.append((one, two))
    i, j = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(-1)
    a, b, x, y = first[..., i], first[..., j], vectors[..., i], vectors[..., j]
    phase = torch.atan2((a * y - b * x).sum(0), (a * x + b * y).sum(0))
    angle = phase[1] / places[1] if len(places) > 1 else 0 * phase[0]
    for p, observed in zip(places[2:].tolist(), phase[2:], strict=True):
        angle = (observed + 2 * math.pi * ((p * angle - observed) / (2 * math.pi)).round()) / p
    return Turning(i, j, angle, vectors.shape[-1])
