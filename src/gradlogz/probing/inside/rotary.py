"""Rotary embeddings: queries and keys that are turned by their positions.

    q_i    = x W_q R(i),   k_j = y W_k R(j)         R(p): pairs of coordinates, turned by p times their angle    [su21]
    logit  = beta x W_q R(i - j) W_kᵀ yᵀ            another form for every distance
    R̄      = sum_d w(d) R(d)                        w(d): the weight that a head gives to keys at the distance d
    W_q R̄ W_kᵀ                                      the form of a head, averaged over what it attends to

The pairs and angles of a layer are found by asking it about one token at every position of a window: two coordinates
are a pair if one gains in square what the other loses. Angles come from the first position and are made more exact by
each that is twice as far. That all positions are turned so is checked there, and in a window of another length: what
does not pass, such as angles that depend on the length or on places in an image, has no average.

Read next: ../predictions/observables/attention_distance.py (the weights w), weights.py (who asks),
../predictions/qk_geometry.py.
"""

import math

import torch

from ..._typing import Float, Int, Tensor
from .events import LayerCall
from .head_weights import Turning
from .reprojection import call_on

DRAWS = 4  # tokens that a layer is asked about
MOVED = 16.0  # units of rounding by which a coordinate must move to be one that turns
OPPOSED = 0.9  # cosine of the gains in square of a pair, with the sign changed


def turning_of(layer_call: LayerCall, other: LayerCall, *, layers: str, rounding: float) -> Turning | str:
    """How a layer turns its queries and keys, asked in two windows of different lengths; or why that is not known."""
    unit = torch.finfo(layer_call.given.dtype).eps
    window, small = _answers(layer_call, layers), _answers(other, layers)
    if window is None or small is None:
        return "it computes its own logits"
    found, places = window
    turning = _pairs(found, places, MOVED * max(unit, torch.finfo(torch.float32).eps))
    if turning is None:
        return "its rotations are not those of pairs of coordinates"
    if turning.error(found, places) > rounding:
        return "its rotations are not powers of the first"
    if turning.error(*small) > rounding:
        return "its rotations depend on the length of the text"
    return turning


def _answers(layer_call: LayerCall, layers: str) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [t, p, d] of a few tokens, each at many places [p] of the window, the first among them."""
    n, width = layer_call.given.shape[1:]
    places = torch.tensor(sorted({0, n - 1, *(2**k for k in range(max(n - 1, 1).bit_length()) if 2**k < n)}))
    tokens = torch.randn(DRAWS, width, generator=torch.Generator().manual_seed(0)).to(layer_call.given)
    found = []
    for token in tokens:
        call = call_on(layer_call, token.expand_as(layer_call.given).contiguous(), layers=layers)
        if call is None:
            return None
        found += [t[0, :, places].double().cpu() for t in (call.query, call.key)]
    return torch.cat(found), places


def _pairs(found: Float[Tensor, "t p d"], places: Int[Tensor, " p"], moved: float) -> Turning | None:
    """The pairs of coordinates that turn, and their angles; None if those that move are no pairs."""
    first = found[:, :1]
    turns = (found - first).abs().amax((0, 1)) > moved * found.abs().max()
    gains = (found.square() - first.square()).flatten(0, 1)
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
    a, b, x, y = first[..., i], first[..., j], found[..., i], found[..., j]
    phase = torch.atan2((a * y - b * x).sum(0), (a * x + b * y).sum(0))
    angle = phase[1] / places[1] if len(places) > 1 else 0 * phase[0]
    for p, seen in zip(places[2:].tolist(), phase[2:], strict=True):
        angle = (seen + 2 * math.pi * ((p * angle - seen) / (2 * math.pi)).round()) / p
    return Turning(i, j, angle, found.shape[-1])
