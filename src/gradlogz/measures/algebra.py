"""Operations on measures, and the parts of a transformer they are.

    tilt(h, a)           exp(<x,a>-G(a)) h     G(a + eta) - G(a)             a family member, as a measure
    convolve(h1, h2)     law of x1 + x2        G1 + G2                       residual connection, multi-head attention
    add(h1, h2)          h1 + h2               log(exp G1 + exp G2)          more keys: the merge of partial attentions
    product(h1, h2)      law of (x1, x2)       G1(eta1) + G2(eta2)           keys of independent blocks
    pushforward(h, W)    law of W x + b        G(W^T eta) + <b, eta>         projections; a scalar W is a temperature
    reweight(h, log c)   c h                   G + log c                     mass: 1/n instead of counting

Each returns a measure, which can be operated on again.   [theory 3.3, 3.8, 3.9]

Read next: composed.py (the measures these make), duality.py (the other side).
"""

import torch

from .._errors import InputValueError, check_floats, present
from .._typing import Float, Tensor, as_scalar_tensor
from .composed import Convolution, Product, Pushforward, Reweighted, Sum, Tilted
from .measure import Measure, check_measures
from .validation import common_batch


def tilt(h: Measure, by: Float[Tensor, "*b d"]) -> Measure:
    """exp(<x, by> - G(by)) h(dx): the family member at `by`, of mass one, as a measure of its own.

    G_tilted(eta) = G(by + eta) - G(by): tilting is a translation (cocycle).   [theory 3.3]
    """
    return Tilted(h, by)


def convolve(*measures: Measure) -> Measure:
    """The law of a sum of independent draws: log normalisers, means and covariances add.   [theory 3.8, 3.9]

    With the Dirac at x (an `Empirical` of one point) it is the residual connection, with one empirical measure per
    head it is multi-head attention, with a centred Gaussian it smooths the keys.
    """
    return Convolution(_joined("convolve", measures))


def add(*measures: Measure) -> Measure:
    """h1 + h2 + ...: G = log sum_k exp G_k, of any mass and of several kinds.   [theory 3.8]

    Adding key blocks is how flash and ring attention merge partial results; here the covariance is merged too.
    """
    return Sum(_joined("add", measures))


def product(*measures: Measure) -> Measure:
    """Independent blocks of coordinates, the law of (x1, x2, ...): eta splits into blocks, G adds."""
    return Product(_joined("product", measures, one_dimension=False))


def pushforward(
    h: Measure,
    matrix: Float[Tensor, "*#b e d"] | Float[Tensor, "*#b"] | float,
    shift: Float[Tensor, "*#b e"] | None = None,
) -> Measure:
    """The law of W x + b for any W, singular and rectangular ones too: G'(eta) = G(W^T eta) + <b, eta>.   [theory E49]

    A number, or a tensor [*b], in place of W scales: pushforward(h, beta) is h at inverse temperature beta.
    """
    check_measures("pushforward", h=h)
    W = as_scalar_tensor(matrix, h._reference(), len(h.batch_shape))
    if isinstance(W, Tensor) and W.ndim == len(h.batch_shape):
        W = W[..., None, None] * torch.eye(h.dim, dtype=W.dtype, device=W.device)
    return Pushforward(h, W, shift)


def reweight(h: Measure, log_mass: float | Float[Tensor, "*b"]) -> Measure:
    """exp(log_mass) h: G moves by a constant, mean and covariance not at all.   [theory E3]"""
    check_measures("reweight", h=h)
    return Reweighted(h, as_scalar_tensor(log_mass, h._reference(), len(h.batch_shape)))


def _joined(call: str, measures: tuple[Measure, ...], *, one_dimension: bool = True) -> tuple[Measure, ...]:
    if not measures:
        raise InputValueError(
            call, "measures", "at least one measure must be given, got none", "Pass the parts one by one."
        )
    check_measures(call, **{f"measure {i}": h for i, h in enumerate(measures)})
    check_floats(call, **present(**{f"measure {i}": h._reference() for i, h in enumerate(measures)}))
    if one_dimension and len({h.dim for h in measures}) > 1:
        fact = ", ".join(f"d={h.dim}" for h in measures)
        remedy = "Use pushforward to bring them to one space."
        raise InputValueError(call, "measures", f"measures must live on one space, got {fact}", remedy)
    common_batch(call, *(h.batch_shape for h in measures))
    return measures
