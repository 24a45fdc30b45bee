"""Null of updates that keeps the axes of every head: random rotations between what a head reads and what it writes.

    z W_o     update by a head                      z: its output, W_o: its rows of the output projection
    P S Qᵀ    = C^½ W_o                             singular value decomposition; C = sum zᵀ z
    A         = C^-½ P S O S Qᵀ √d / |S|            in place of W_o; O: uniformly distributed rotation of d dimensions
    s         = sum <y, z A>                        mean 0;  y: what updates are compared with, such as a gradient
    Var s     = tr(G Kᵀ C K) / tr(C G)              K = sum (y W_oᵀ)ᵀ z,  G = W_o W_oᵀ

The size of the updates and all axes that weights share are kept. No matrix of the width of the stream is summed, and no
change of basis of the values has an effect. Heads of a layer have rotations of their own: their variances are added.

Read next: moved_tokens.py (the tokens), ../tie.py (the same null for matrices).
"""

import math

import torch

from ...._typing import Bool, Float, Tensor
from ...hypothesis_tests import band
from ...inside.head_weights import HeadWeights, centred
from ...prediction import Probed
from ...runs.judgement import Measured
from ...statistics import Sums
from .moved_tokens import Site


def products_of(
    site: Site, along: Float[Tensor, "k b r D"], heads: Float[Tensor, "k b h r v"], valid: Bool[Tensor, "b r"]
) -> Sums | None:
    """K and C of every head, [1, h, 2, v, v], for outputs z of the heads and vectors y of the stream."""
    read = site.read_by_heads(along)
    if read is None:
        return None
    wide = torch.promote_types(heads.dtype, torch.float32)
    z = torch.where(valid[:, None, :, None], heads, 0.0).to(wide).movedim(2, 0).flatten(1, -2)  # [h, tokens, v]
    p = torch.where(valid[:, None, :, None], read, 0.0).to(wide).movedim(2, 0).flatten(1, -2)
    return Sums(torch.stack((p.mT @ z, z.mT @ z), 1).double().unsqueeze(0))


def widened(turned: Measured, products: Sums | None, model: Probed, size: Tensor) -> Measured:
    """Null with the wider of two bands: that of rotated updates, and that of s / size.

    Without a band where the second is unknown.
    """
    spread = None if products is None else deviation(products, model, turned.layer)
    if spread is None:
        return turned._replace(low=math.nan, high=math.nan)
    _, low, high = band(0.0, float(spread / size))  # NaN for a layer that adds nothing
    return turned._replace(low=min(turned.low, low), high=max(turned.high, high))


def deviation(products: Sums, model: Probed, layer: str) -> float | None:
    """Standard deviation of s; None if the layer has no matrices, or a norm between them and the stream."""
    weights, sublayer = model.weights.get(layer), model.architecture.branch_of(layer)
    if not isinstance(weights, HeadWeights) or weights.output is None:
        return None
    if sublayer is None or sublayer.closes is not None:
        return None
    norm = sublayer.reads or sublayer.follows
    W = weights.output.double()
    W = centred(W, -1) if norm is not None and norm.centres else W
    (K, C), G = products.totals[0].to(W.device).unbind(1), W @ W.mT
    size = (C * G).sum((-2, -1))
    variance = torch.where(size > 0, ((K.mT @ C @ K) * G).sum((-2, -1)) / size, 0.0)
    return float(variance.clamp(min=0.0).sum().sqrt())
