"""Operations on measures, which are the parts of a transformer.

    tilt(h, a)           exp(<x,a>-G(a)) h     G(a + eta) - G(a)             a family member, as a measure
    convolve(h1, h2)     x1 + x2, independent  G1 + G2                       residual connection, multi-head attention
    add(h1, h2)          h1 + h2               log(exp G1 + exp G2)          more keys: the merge of partial attentions
    product(h1, h2)      (x1, x2), independent G1(eta1) + G2(eta2)           keys of independent blocks
    pushforward(h, W)    W x + b               G(W^T eta) + <b, eta>         projections; a scalar W is a temperature
    reweight(h, log c)   c h                   G + log c                     mass: 1/n instead of counting

Each returns a measure, so that operations can be nested.   [theory 3.3, 3.8, 3.9]

Read next: composed.py (the classes of the results), duality.py (from means to natural parameters).
"""

import torch

from .._errors import InputValueError, check_floats, present
from .._typing import Float, Tensor, as_scalar_tensor
from .composed import Convolution, Product, Pushforward, Reweighted, Sum, Tilted
from .measure import Measure, check_measures
from .validation import common_batch


def tilt(h: Measure, by: Float[Tensor, "*b d"]) -> Measure:
    """exp(<x, by> - G(by)) h(dx): the family member at `by` as a measure of mass one.

    G_tilted(eta) = G(by + eta) - G(by): tilting is a translation (cocycle).   [theory 3.3]
    """
    return Tilted(h, by)


def convolve(*measures: Measure) -> Measure:
    """Distribution of a sum of independent draws: log normalisers, means and covariances add.   [theory 3.8, 3.9]

    With the Dirac at x (an `Empirical` of one point) it is the residual connection, with one empirical measure per
    head it is multi-head attention, with a centred Gaussian it smooths the keys.
    """
    return Convolution(_joined("convolve", measures))


def add(*measures: Measure) -> Measure:
    """Sum h1 + h2 + ... of measures of any mass and class: G = log sum_k exp G_k.   [theory 3.8]

    Flash and ring attention merge partial results in this way; here covariances are merged too.
    """
    return Sum(_joined("add", measures))


def product(*measures: Measure) -> Measure:
    """Joint distribution of independent blocks of coordinates (x1, x2, ...): eta splits into blocks, G adds."""
    return Product(_joined("product", measures, one_dimension=False))


def pushforward(
    h: Measure,
    matrix: Float[Tensor, "*#b e d"] | Float[Tensor, "*#b"] | float,
    shift: Float[Tensor, "*#b e"] | None = None,
) -> Measure:
    """Distribution of W x + b for any W, also singular or rectangular: G'(eta) = G(W^T eta) + <b, eta>.   [theory E49]

    A number, or a tensor [*b], in place of W scales: pushforward(h, beta) is h at inverse temperature beta.
    """
    check_measures("pushforward", h=h)
    W = as_scalar_tensor(matrix, h._reference(), len(h.batch_shape))
    if isinstance(W, Tensor) and W.ndim == len(h.batch_shape):
        W = W[..., None, None] * torch.eye(h.dim, dtype=W.dtype, device=W.device)
    return Pushforward(h, W, shift)


def reweight(h: Measure, log_mass: float | Float[Tensor, "*b"]) -> Measure:
    """exp(log_mass) h: adds a constant to G; mean and covariance are unchanged.   [theory E3]"""
    check_measures("reweight", h=h)
    return Reweighted(h, as_scalar_tensor(log_mass, h._reference(), len(h.batch_shape)))


def _joined(call: str, measures: tuple[Measure, ...], *, one_dimension: bool = True) -> tuple[Measure, ...]:
    if not measures:
        raise InputValueError(call, "measures", "measures is empty", "Pass at least one measure.")
    check_measures(call, **{f"measure {i}": h for i, h in enumerate(measures)})
    check_floats(call, **present(**{f"measure {i}": h._reference() for i, h in enumerate(measures)}))
    if one_dimension and len({h.dim for h in measures}) > 1:
        fact = ", ".join(f"d={h.dim}" for h in measures)
        remedy = "Map them to one space with pushforward."
        raise InputValueError(call, "measures", f"measures must have one dimension d, got {fact}", remedy)
    common_batch(call, *(h.batch_shape for h in measures))
    return measures
