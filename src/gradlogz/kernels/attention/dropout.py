"""Dropout of attention weights, recomputed from a seed instead of stored.

    factor = 0 with probability p, else 1 / (1 - p)

Read next: blocked.py, the kernel that applies it.
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from .scoring import Block


class Dropout(NamedTuple):
    """Probability of dropping a weight, and the seed, a tensor [].

    A hash of the seed and of the index in [b, h, m, n] decides about each weight. Forward and backward pass agree for
    any division into blocks, and no mask is stored.
    """

    probability: float
    seed: Int[Tensor, ""]

    def factors(
        self,
        size: tuple[int, int, int, int],
        block: Block,
        dtype: torch.dtype,
        *,
        batches: slice = slice(None),
        heads: slice = slice(None),
    ) -> Float[Tensor, "b h m n"]:
        """Factors on a block of the weights [b, h, m, n]: 0 if dropped, otherwise 1 / (1 - p)."""
        (b, h, m, n), device = size, self.seed.device
        head = torch.arange(b * h, device=device).view(b, h, 1, 1)[batches, heads]
        row = torch.arange(block.first_row, block.last_row, device=device).unsqueeze(-1)
        key = torch.arange(block.first_key, block.last_key, device=device)
        # splitmix64, whose constants are negative as signed integers.
        x = ((head * m + row) * n + key) * -0x61C8864680B583EB + self.seed
        for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
        x = (x >> 11) & ((1 << 53) - 1)
        survives = x >= int(self.probability * (1 << 53))
        return survives.to(dtype) / (1 - self.probability)
