"""Results of layers inside a reentrant checkpoint: torch computes them without autograd.

Their statistics can be read. A derivative would silently be 0; it is an error instead.

Read next: observation.py and huggingface.py, which record such results.
"""

from typing import Any

import torch

from ..._errors import InputRuntimeError
from ..._typing import Tensor
from ..result import Attention


def refusing_gradients(result: Attention) -> Attention:
    """Result with the same values, whose derivative is an error."""
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        return Attention(*(None if t is None else _RefusedGradient.apply(t, anchor) for t in result))  # type: ignore[arg-type]


class _RefusedGradient(torch.autograd.Function):
    """Identity whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, statistic: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        return statistic.view_as(statistic)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        problem = "statistics inside a reentrant checkpoint have no gradient, since torch computes it without autograd"
        raise InputRuntimeError("observe", "model", problem, "Pass use_reentrant=False to the checkpoint.")
