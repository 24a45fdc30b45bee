"""Attention that reports its own statistics.

attend      scaled dot-product attention with the log normaliser, entropy and logit moments of every row
Attention   what it returns; `merge` joins results over blocks of keys
layers      attention with parameters: MultiheadAttention
"""

from .functional import attend
from .layers import MultiheadAttention
from .result import Attention

__all__ = [
    "attend",
    "Attention",
    "MultiheadAttention",
]
