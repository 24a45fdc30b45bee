"""Values too wide for a kernel, a part of their columns at a time.

    output_i  = sum_n p_n v_n,i                 every column by itself, from the same weights
    ds        = p (dp + c),   dp = sum_i dp_i   the gradient of a logit is a sum over columns; c goes with the first

Moments of keys and values are attention with wide values ([v, v^2, k, |k|^2], ../../attention/functional.py): on a GPU
they pass through here where heads are large.

Read next: gpu.py, which takes values of up to 256 columns.
"""

from typing import Any, NamedTuple

import torch

from ..._typing import Float, Tensor
from .reference import Statistics
from .scoring import Scoring, Sight


class Chunked(NamedTuple):
    """A kernel for values of any width, made of one for values of limited width."""

    kernel: Any
    widest: int

    def forward(
        self,
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n v"],
        sight: Sight,
        scoring: Scoring,
        *,
        statistics: bool,
    ) -> Statistics:
        """The statistics of every row; they are taken with the first columns."""
        found = [
            self.kernel.forward(query, key, part, sight, scoring, statistics=statistics and i == 0)
            for i, part in enumerate(self.parts(value))
        ]
        return found[0]._replace(output=torch.cat([part.output for part in found], -1))

    def backward(
        self,
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n v"],
        sight: Sight,
        scoring: Scoring,
        log_normalizer: Float[Tensor, "b h m"],
        mean_logit: Float[Tensor, "b h m"],
        grad_output: Float[Tensor, "b h m v"],
        c0: Float[Tensor, "b h m"],
        c1: Float[Tensor, "b h m"] | None,
        c2: Float[Tensor, "b h m"] | None,
        *,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of query, key, value and bias."""
        whole: list[Any] = []
        for part, grad in zip(self.parts(value), self.parts(grad_output), strict=True):
            row = (c0, c1, c2) if not whole else (torch.zeros_like(c0), None, None)
            near = (query, key, part, sight, scoring, log_normalizer, mean_logit, grad, *row)
            whole.append(self.kernel.backward(*near, needs_bias=needs_bias))
        of_query, of_key, of_value, of_bias = zip(*whole, strict=True)
        bias = None if of_bias[0] is None else torch.stack(of_bias).sum(0)
        return torch.stack(of_query).sum(0), torch.stack(of_key).sum(0), torch.cat(of_value, -1), bias

    def parts(self, wide: Float[Tensor, "*b v"]) -> tuple[Tensor, ...]:
        """Columns in parts of nearly one size, none above the widest."""
        count = -(-wide.shape[-1] // self.widest)
        return torch.tensor_split(wide, count, -1)
