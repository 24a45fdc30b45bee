"""Layers: attention with parameters, one file each.

MultiheadAttention   torch.nn's, with the statistics of every head
"""

from .multihead import MultiheadAttention

__all__ = ["MultiheadAttention"]
