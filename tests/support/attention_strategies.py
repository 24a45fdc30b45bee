"""Hypothesis strategies for random keys and queries of all sizes, the operands of most theorems."""

from typing import NamedTuple

from hypothesis import strategies as st
from torch import Tensor

from support.measure_registry import Source, seeds


class Attention(NamedTuple):
    """n keys and one query of dimension d, and a source of further random numbers."""

    keys: Tensor
    query: Tensor
    source: Source


@st.composite
def attentions(draw, min_keys: int = 1, max_keys: int = 8, max_dim: int = 5, scales=(1e-3, 1.0, 30.0)) -> Attention:
    """Draw keys [n, d] of one of these scales and a query [d] of scale one."""
    n, d = draw(st.integers(min_keys, max_keys)), draw(st.integers(1, max_dim))
    source = Source(draw(seeds))
    return Attention(source.normal(n, d) * draw(st.sampled_from(scales)), source.normal(d), source)
