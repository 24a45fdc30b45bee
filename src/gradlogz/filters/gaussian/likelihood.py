"""Log likelihood of a series under a switching filter, with a compiled gradient.

    l = sum_t log p(y_t | y_1 ... y_t-1)       imm or gpb2; dl/d(transition, F, Q, H, R, b, d, initial modes)

The filter runs forward and the kernel of ../../kernels/filters/gradients_in_lanes.py runs back, so that the gradient of
all parameters costs about as much as two or three filters. There is one derivative: second ones need `imm` or `gpb2`.

Read next: switching.py (the filters), ../fitting/gradient_fit.py (maximum likelihood).
"""

from typing import Any

import torch

from ..._typing import Float, Tensor
from ...kernels.filters.dispatch import backward_kernel
from ...kernels.filters.fields import FILTERED_MODES, MODEL_ENDS, summed
from ..models.switching_model import Parameters
from ..results import FilterState
from ..validation import PreparedSeries, filter_name
from .switching import SwitchingFilter, filter_prepared


def log_likelihood(
    call: str, chosen: SwitchingFilter, series: PreparedSeries, initial: FilterState
) -> Float[Tensor, "*b"]:
    """Log likelihood of each target by imm or gpb2, differentiable once.

    Derivatives in the observations, modes with components, and numbers that are not finite take the torch path.
    Law: tests/kernels/test_compiled_gradients_agree_with_the_torch_path.py.
    """
    parameters, y, observed = series
    start = tuple(initial)[:3]
    if isinstance(parameters, Parameters) and parameters.has is None and not y.requires_grad:
        model = tuple(parameters[:7])
        detached: Any = tuple(None if t is None else t.detach() for t in (*model, *start, y))
        kernel = backward_kernel(detached, y.shape[:-1].numel() * chosen.model.modes**2, is_repeated=True)
        if kernel is not None:
            with torch.no_grad():
                bare = PreparedSeries(Parameters(*detached[:7]), y, observed)
                state = FilterState(detached[7], detached[8], detached[9], initial.log_likelihood)
                filtered = filter_prepared(call, chosen, bare, state, FILTERED_MODES)
                modes = tuple(getattr(filtered, name) for name in FILTERED_MODES)
                forward = kernel.FilteredSeries(detached[:7], detached[7:10], modes, y, observed)
            needed = frozenset(
                name for name, t in zip(MODEL_ENDS, model, strict=True) if t is not None and t.requires_grad
            )
            slopes = kernel.differentiate(forward, filter_name(chosen.order), needed)
            if slopes is not None:
                return _Known.apply(filtered.log_likelihood, slopes, *model, *start)  # type: ignore[no-untyped-call, no-any-return]
    return filter_prepared(call, chosen, series, initial, ()).log_likelihood


class _Known(torch.autograd.Function):
    """A value for each target whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: dict[str, Tensor], *arguments: Tensor | None) -> Tensor:
        names = (*MODEL_ENDS, "mean", "covariance", "log_probability")
        ctx.slopes = [slopes.get(name) for name in names]
        ctx.shapes = [None if t is None else t.shape for t in arguments]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outside: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[2:]
        each = zip(ctx.slopes, ctx.shapes, needed, strict=True)
        results = (
            summed(outside, slope, shape) if is_needed and slope is not None else None
            for slope, shape, is_needed in each
        )
        return None, None, *results
