"""Norms of a trained layer: one of its own for each sublayer.

    post   x + A -> N_a,  y + F -> N_f                     pre   A(N_a(x)),  F(N_f(y))

Read next: contraction.py (LayerNorm with gain, bias and eps), evolution.py (the step), trained_heads.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .._typing import Tensor
from .contraction import Contraction, ContractionLike, GaussianStep, contraction_of


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """Contractions of the sublayers of one layer, for `evolve` in place of one contraction.

    The placement selects those that are used: "post" the two after sublayers, "pre" the two before them, "peri" all
    but the last one.
    """

    before_attention: ContractionLike = "none"
    after_attention: ContractionLike = "none"
    before_feed_forward: ContractionLike = "none"
    after_feed_forward: ContractionLike = "none"

    def resolved(self, tau: float | Tensor, step: GaussianStep | None = None) -> "ResolvedNorms":
        """Return the contractions as functions; step: the ascent that they follow."""
        places = (self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward)
        return ResolvedNorms(*(contraction_of(each, tau, step) for each in places))


class ResolvedNorms(NamedTuple):
    """The contractions of `LayerNorms` as functions."""

    before_attention: Contraction
    after_attention: Contraction
    before_feed_forward: Contraction
    after_feed_forward: Contraction


def norms_of(
    contraction: ContractionLike | LayerNorms, tau: float | Tensor, step: GaussianStep | None = None
) -> ResolvedNorms:
    """Return the contractions of a step: those of `LayerNorms`, or one contraction at every place."""
    if isinstance(contraction, LayerNorms):
        return contraction.resolved(tau, step)
    return ResolvedNorms(*[contraction_of(contraction, tau, step)] * 4)
