"""Values too wide for a kernel, in chunks of columns.

    output_i  = sum_n p_n v_n,i                 each column separately, with the same weights
    ds        = p (dp + c),   dp = sum_i dp_i   the gradient of a logit is a sum over columns; c goes with the first

Moments of keys and values are attention with wide values ([v, v^2, k, |k|^2], ../../attention/functional.py), which on
a GPU exceed the limit if heads are large.

Read next: gpu.py, which takes values of up to 256 columns.
"""

from typing import Any, NamedTuple

import torch

from ..._typing import Float, Tensor
from .reference import Gradients, Statistics
from .scoring import Scoring, Sight


class Chunked(NamedTuple):
    """Kernel for values of any width, made from a kernel for values of limited width."""

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
        separate: bool = False,
    ) -> Statistics:
        """Statistics of every row, computed with the first chunk of columns."""
        results = [
            self.kernel.forward(query, key, part, sight, scoring, statistics=statistics and i == 0, separate=separate)
            for i, part in enumerate(self.parts(value))
        ]
        return results[0]._replace(output=torch.cat([part.output for part in results], -1))

    def coefficients(self, result: Statistics, gradients: Gradients) -> Float[Tensor, "k b h m"]:
        """Coefficients of every row, which do not depend on the width of the values."""
        return self.kernel.coefficients(result, gradients)

    def backward(
        self,
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n v"],
        sight: Sight,
        scoring: Scoring,
        per_row: Float[Tensor, "k b h m"],
        grad_output: Float[Tensor, "b h m v"],
        *,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of query, key, value and bias."""
        without_c = torch.stack((per_row[0], torch.zeros_like(per_row[1])))
        grads: list[Any] = []
        for part, grad in zip(self.parts(value), self.parts(grad_output), strict=True):
            rows = without_c if grads else per_row
            grads.append(self.kernel.backward(query, key, part, sight, scoring, rows, grad, needs_bias=needs_bias))
        query_grads, key_grads, value_grads, bias_grads = zip(*grads, strict=True)
        bias = None if bias_grads[0] is None else torch.stack(bias_grads).sum(0)
        return torch.stack(query_grads).sum(0), torch.stack(key_grads).sum(0), torch.cat(value_grads, -1), bias

    def parts(self, wide: Float[Tensor, "*b v"]) -> tuple[Tensor, ...]:
        """Split the columns into chunks of nearly equal width, at most `widest`."""
        count = -(-wide.shape[-1] // self.widest)
        return torch.tensor_split(wide, count, -1)
