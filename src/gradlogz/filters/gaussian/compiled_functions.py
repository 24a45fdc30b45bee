"""Switching filters of built-in functions and of modes that lack components, in a compiled kernel.

Read next: ../../kernels/filters/functions.py (the kernel), switching.py (the caller).
"""

import functools
import math

import torch

from ..._errors import has_values
from ..._typing import Bool, Float, Tensor
from ...kernels.filters.dispatch import function_kernel
from ...kernels.filters.fields import KernelResult
from ..models.function_forms import linear_functions
from ..models.nonlinear_model import NonlinearParameters
from ..models.switching_model import ENDS, Parameters
from ..results import FilterState


def filter_functions(
    depth: int,
    parameters: Parameters | NonlinearParameters,
    state: FilterState,
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
    is_online: bool,
) -> KernelResult | None:
    """Filter a series; None if no kernel supports the model, the filter or the values."""
    y, k = observations, parameters.transition.shape[-1]
    (s,), o, batch = state.mean.shape[-1:], y.shape[-1], tuple(y.shape[:-2])
    if y.device.type != "cpu" or not has_values(y, parameters.transition, parameters.R):
        return None
    if depth > 2 or state.log_probability.shape[-1] != k:
        return None
    fields: dict[str, Tensor] = {}
    for name in ("transition", "F", "Q", "H", "R", "b", "d", "dt"):
        if (field := getattr(parameters, name, None)) is not None:
            if (by_target := _by_target(field, len(ENDS[name]), batch)) is None:
                return None
            fields[name] = by_target
    sigma, has = None, parameters.has
    if isinstance(parameters, Parameters):
        functions = linear_functions(k, o)
        fields.setdefault("b", y.new_zeros(1, k, s))
        fields.setdefault("d", y.new_zeros(1, k, o))
    else:
        model, has = parameters.model, parameters.active
        if model.packed is None or model.packed.is_flow != ("dt" in fields):
            return None
        sigma = (float(model.alpha), float(model.beta), float(model.kappa)) if model.method == "ukf" else None
        functions = model.packed
        fields |= functions.matrices
    filters = y.shape[:-1].numel() * k ** max(depth, 1)
    kernel = function_kernel((*fields.values(), *state, y), filters, is_online=is_online)
    if kernel is None or (functions.is_flow and fields["Q"].shape[0] > 1):
        return None
    if functions.is_flow:
        functions, fields["F"], fields["Q"] = functions.over(fields["dt"], fields["Q"])
    problem = kernel.FunctionProblem(
        tuple(fields[name] for name in ("transition", "F", "Q", "H", "R", "b", "d")),
        _every_component(k, s) if has is None else has,
        parameters.has is not None,
        functions.move,
        functions.observe,
        functions.numbers,
        functions.is_flow,
        functions.angles,
        sigma,
    )
    result: KernelResult | None = kernel.forward(depth, problem, tuple(state), y, observed, last=last, wanted=wanted)
    return result


@functools.lru_cache(maxsize=64)
def _every_component(k: int, s: int) -> Bool[Tensor, "k s"]:
    return torch.ones(k, s, dtype=torch.bool, device="cpu")


def _by_target(field: Tensor, ending: int, batch: tuple[int, ...]) -> Tensor | None:
    """Field of one step, [1, ...] or [targets, ...]; None if it varies with time or is for other targets."""
    if field.ndim == ending:
        return field.unsqueeze(0)
    if field.ndim == ending + 1 and field.shape[0] == 1:
        return field
    if field.shape[-ending - 1] != 1:
        return None
    field = field.squeeze(-ending - 1)
    lead, shape = field.shape[: field.ndim - ending], field.shape[field.ndim - ending :]
    if lead.numel() == 1:
        return field.reshape(1, *shape)
    if len(lead) != len(batch) or any(a not in (1, b) for a, b in zip(lead, batch, strict=True)):
        return None
    return field.expand(*batch, *shape).reshape(math.prod(batch), *shape)
