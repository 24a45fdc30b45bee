"""Gradient of imm and gpb2 on the CPU, compiled by numba.

    differentiate    called by ../../filters/gaussian/compiled_gradient.py in the backward pass

The filter runs again in the backward pass, so that nothing but the inputs is kept between the passes. If the gradient
is always needed, ../../filters/gaussian/likelihood.py goes back at once.

Read next: backward.py (the pass back), gpu_gradients.py (the same on a GPU).
"""

from collections.abc import Mapping
from typing import Any

from ..._typing import Bool, Float, Tensor
from . import backward, cpu
from .fields import FIELDS, FILTERED_MODES, MODEL_ENDS, summed

IS_COMPARED_FIRST = False


def differentiate(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    outside: Mapping[str, Tensor],
    needed: frozenset[str],
) -> dict[str, Tensor] | None:
    """Gradients in the needed inputs; None if a number is not finite or gradients in the last state are given.

    Arguments as in gpu_gradients.py.
    """
    if outside.keys() != {"log_likelihood"}:
        return None
    y, start, wanted = observations, (*state, outside["log_likelihood"]), frozenset(FILTERED_MODES)
    filtered = cpu.forward(depth, parameters, start, y, observed, last=False, wanted=wanted)
    if filtered is None:
        return None
    modes = dict(zip(FIELDS, filtered.reported, strict=True))
    *model, d = parameters
    if "y" in needed:  # dl/dy = -sum_j dl/dd_j at every step
        k = state[0].shape[-2]
        d = (y.new_zeros(k, y.shape[-1]) if d is None else d).expand(*y.shape[:-1], k, y.shape[-1])
    by_mode: Any = tuple(modes[name] for name in FILTERED_MODES)
    series = backward.FilteredSeries((*model, d), state, by_mode, y, observed)
    of_d = {"d"} if "y" in needed else set()
    slopes = backward.differentiate(series, "gpb2" if depth == 2 else "imm", needed & MODEL_ENDS.keys() | of_d)
    if slopes is None:
        return None
    shapes = dict(zip((*MODEL_ENDS, "mean", "covariance", "log_probability"), (*parameters, *state), strict=True))
    results = {name: summed(outside["log_likelihood"], slopes[name], shapes[name].shape) for name in needed - {"y"}}
    if "y" in needed:
        results["y"] = summed(outside["log_likelihood"], -slopes["d"].sum(-2), y.shape)
    return results
