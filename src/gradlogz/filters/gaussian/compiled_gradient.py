"""Series filtered by a compiled kernel whose gradient is compiled too.

    forward     the kernel of the filter
    backward    gradients in the log likelihood                          ../../kernels/filters/cpu_gradients.py
                and in the last state, on a GPU                          ../../kernels/filters/gpu_gradients.py
                gradients in other fields, second derivatives,
                several gradients at once (is_grads_batched)             the torch path, run again

Nothing is kept between the passes but the inputs. A kernel of a GPU is compared with automatic differentiation of the
torch path on a small problem before its first use.

Read next: switching.py (the caller), likelihood.py (the log likelihood of fits).
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Tensor
from ...kernels.filters.dispatch import gradient_kernel
from ...kernels.filters.fields import MODEL_ENDS
from ..models.switching_model import Parameters
from ..results import FilterState

Tensors = tuple[Any, ...]  # Tensor, or None: b and d of a model
Advance = Callable[[Parameters, FilterState, Tensor, Tensor | None, int], tuple[FilterState, Any]]
MODEL = 7  # tensors of a model: transition, F, Q, H, R, b, d
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the comparison before the first use


class Pass(NamedTuple):
    """All steps of a series, as functions of the tensors of its model, its initial state and its observations.

    Attributes:
        depth: 0 for "imm", 2 for "gpb2".
        observed: mask of observed entries.
        compiled: computes the tensors of the last state, then the requested fields; None if no kernel supports them.
        by_torch: computes the same, differentiable.
        advance: one step of the torch path.
    """

    depth: int
    observed: Bool[Tensor, "*b t o"] | None
    compiled: Callable[[Tensors], Tensors | None]
    by_torch: Callable[[Tensors], Tensors]
    advance: Advance


def filter_with_gradient(steps: Pass, tensors: Tensors, *, reports: bool) -> Tensors | None:
    """Results of the steps, differentiable; None if no kernel supports them. reports: fields are requested."""
    (modes, observation, state), y = tensors[3].shape[-3:], tensors[-1]
    kernel = gradient_kernel(tensors, y.shape[:-1].numel() * modes ** max(steps.depth, 1), reports=reports)
    if kernel is None or steps.depth not in (0, 2):
        return None
    sizes = (modes, state, observation)
    if kernel.IS_COMPARED_FIRST and not _is_right(kernel, steps.advance, steps.depth, sizes, y.dtype, y.device):
        return None
    with torch.no_grad():
        results = steps.compiled(tuple(None if t is None else t.detach() for t in tensors))
    return None if results is None else _Steps.apply(kernel, steps, results, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Steps(torch.autograd.Function):
    """Results that are known, and their gradients."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, steps: Pass, results: Tensors, *tensors: Tensor | None) -> Tensors:
        ctx.kernel, ctx.steps = kernel, steps
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *outside: Tensor | None) -> Tensors:  # type: ignore[override]
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        slopes = None
        are_batched = any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in outside)
        if not are_batched and not torch.is_grad_enabled() and all(t is None for t in outside[4:]):
            slopes = _by_kernel(ctx.kernel, ctx.steps, tensors, needed, outside[:4])
        return None, None, None, *(slopes or _by_torch(ctx.steps, tensors, needed, outside))


def _by_kernel(
    kernel: Any, steps: Pass, tensors: Tensors, needed: Sequence[bool], outside: Sequence[Tensor | None]
) -> list[Any] | None:
    """Gradients of the last state by the kernel; None if a number is not finite."""
    *model_and_state, y = tensors
    parameters, state = tuple(model_and_state[:MODEL]), model_and_state[MODEL:]
    # Of the arguments and of the results, in the order of `tensors` and of `outside`
    names = (*MODEL_ENDS, "mean", "covariance", "log_probability", "log_likelihood", "y")
    ends = ("mean", "covariance", "log_probability", "log_likelihood")
    slopes = kernel.differentiate(
        steps.depth,
        parameters,
        state[:3],
        y,
        steps.observed,
        {name: t for name, t in zip(ends, outside, strict=True) if t is not None},
        frozenset(name for name, is_needed in zip(names, needed, strict=True) if is_needed) - {"log_likelihood"},
    )
    if slopes is None:
        return None
    return [slopes.get(name) if name != "log_likelihood" else outside[3] for name in names]


def _by_torch(steps: Pass, tensors: Tensors, needed: Sequence[bool], outside: Sequence[Tensor | None]) -> list[Any]:
    """Gradients by automatic differentiation of the torch path; differentiable themselves if grad mode is on."""
    is_differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [
            t if t is None or is_differentiable else t.detach().requires_grad_(is_needed)
            for t, is_needed in zip(tensors, needed, strict=True)
        ]
        results = steps.by_torch(tuple(inputs))
        pairs = [
            (t, slope)
            for t, slope in zip(results, outside, strict=True)
            if slope is not None and t is not None and t.requires_grad
        ]
        slopes = torch.autograd.grad(
            [t for t, _ in pairs],
            [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed],
            [slope for _, slope in pairs],
            create_graph=is_differentiable,
            allow_unused=True,
        )
    each = iter(slopes)
    return [next(each) if is_needed else None for is_needed in needed]


@cache
def _is_right(
    kernel: Any, advance: Advance, depth: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare a kernel with automatic differentiation on a small problem; a wrong one is not used, with a warning.

    A kernel that is not compiled, because there is no compiler or sizes are too large, is not used either.
    """
    try:
        pairs = _small_problem(kernel, advance, depth, sizes, dtype, device)
    except (RuntimeError, OSError) as error:  # of torch, or of the driver
        pairs, problem = [], f"fails ({type(error).__name__})"
    else:
        problem = "gives wrong results"
    if pairs is None:
        return False
    tolerance = TOLERANCES[dtype]
    if pairs and all(bool((t - wanted).abs().max() <= tolerance * (1 + wanted.abs().max())) for t, wanted in pairs):
        return True
    text = f"The compiled gradient of filters {problem} with this GPU: a slower one is used."
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return False


def _small_problem(
    kernel: Any, advance: Advance, depth: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]] | None:
    """Gradients of a few steps by the kernel and by automatic differentiation; None if the kernel is not compiled."""
    (k, s, o), targets, times = sizes, 3, 4
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    def positive(*shape: int) -> Tensor:
        root = random(*shape, shape[-1]) / 3
        return root @ root.mT + torch.eye(shape[-1], dtype=torch.float64, device="cpu")

    drawn = (
        random(k, k).softmax(-1),
        0.9 * torch.eye(s, dtype=torch.float64, device="cpu") + 0.1 * random(k, s, s),
        positive(k, s),
        random(k, o, s),
        positive(k, o),
        random(k, s),
        random(k, o),
        random(targets, k, s),
        positive(targets, k, s),
        random(targets, k).log_softmax(-1),
        random(targets),
        random(targets, times, o),
    )
    tensors = tuple(t.to(device, dtype) for t in drawn)
    outside = [t.to(device, dtype) for t in (random(targets, k, s), positive(targets, k, s), random(targets, k))]
    outside.append(random(targets).to(device, dtype))
    observed = torch.ones(targets, times, o, dtype=torch.bool, device=device)
    observed[1, 2, 0] = False

    def by_torch(tensors: Tensors) -> Tensors:
        *model_and_state, y = tensors
        state, parameters = FilterState(*model_and_state[MODEL:]), Parameters(*model_and_state[:MODEL])
        for now, observation, mask in zip(parameters.each(times), y.unbind(-2), observed.unbind(-2), strict=True):
            state, _ = advance(now, state, observation, mask, depth)
        return tuple(state)

    steps, needed = Pass(depth, observed, by_torch, by_torch, advance), [True] * len(tensors)
    with torch.no_grad():
        slopes = _by_kernel(kernel, steps, tensors, needed, outside)
        if slopes is None:
            return None
        expected = _by_torch(steps, tensors, needed, outside)
    for i in (2, 4, MODEL + 1):  # gradients in covariances are those of symmetric matrices
        expected[i] = (expected[i] + expected[i].mT) / 2
    return list(zip(slopes, expected, strict=True))
