"""Calls of attention and of filters on one device: the kernel that serves each, its error, and its speed.

    error    largest difference from the definition in float64, relative to 1 + the largest entry, over the output, the
             log normaliser, the entropy and the gradients
    ratio    time / time of PyTorch's own function in the same process, in turns; for filters, of the torch path

The definition is written out here: it shares no code with a kernel.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .._typing import Tensor
from ..attention.functional import attend
from ..filters.gaussian.switching import imm
from ..filters.models.switching_model import KalmanModel, SwitchingModel
from ..filters.prior_and_series import Prior
from ..kernels.attention import dispatch
from ..kernels.attention.scoring import Scoring, Sight
from ..kernels.filters.dispatch import filtering_kernel
from .records import ServedCall

FILTER = "imm, 3 modes, 500 targets"
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class MeasuredCall(NamedTuple):
    """A call of attend with its statistics; with backward, through the output and the entropy."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    backward: bool = False


CPU_CALLS = (
    MeasuredCall("attend", 1, 8, 512, 512, 64),
    MeasuredCall("attend, causal", 1, 8, 512, 512, 64, causal=True),
    MeasuredCall("attend, backward", 1, 8, 512, 512, 64, backward=True),
    MeasuredCall("attend, bfloat16", 1, 8, 512, 512, 64, dtype=torch.bfloat16),
    MeasuredCall("attend, float64", 1, 8, 256, 256, 64, dtype=torch.float64),
    MeasuredCall("attend, decoding", 1, 8, 1, 2048, 64),
)
GPU_CALLS = (
    MeasuredCall("attend, bfloat16", 4, 16, 2048, 2048, 64, dtype=torch.bfloat16),
    MeasuredCall("attend, bfloat16, causal", 4, 16, 2048, 2048, 128, dtype=torch.bfloat16, causal=True),
    MeasuredCall("attend, bfloat16, backward", 4, 16, 2048, 2048, 64, dtype=torch.bfloat16, backward=True),
    MeasuredCall("attend, float16", 4, 16, 2048, 2048, 64, dtype=torch.float16),
    MeasuredCall("attend, float32", 4, 16, 1024, 1024, 64),
    MeasuredCall("attend, decoding", 4, 16, 1, 4096, 128, dtype=torch.bfloat16),
)


def served_calls(device: torch.device) -> Iterator[ServedCall]:
    """Yield the calls of a device, each when it is measured. A call that raises does not pass, and names its error."""
    for call in GPU_CALLS if device.type == "cuda" else CPU_CALLS:
        yield _measured(call.name, "SDPA", device, partial(_served_attention, call, device))
    yield _measured(FILTER, "torch path", device, partial(_served_filter, device))


def _measured(name: str, rival: str, device: torch.device, measure: Callable[[], ServedCall]) -> ServedCall:
    try:
        return measure()
    except Exception as error:  # a kernel may fail in the compiler, in the driver or in torch
        return ServedCall(
            name, str(device), f"raises {type(error).__name__}", math.nan, False, math.nan, math.nan, rival
        )


def number_of_calls(device: torch.device) -> int:
    """How many calls `served_calls` yields."""
    return 1 + len(GPU_CALLS if device.type == "cuda" else CPU_CALLS)


# Attention ------------------------------------------------------------------------------------------------------------


def _served_attention(call: MeasuredCall, device: torch.device) -> ServedCall:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((call.queries, call.size), (call.keys, call.size), (call.keys, call.size))
    operands = [
        torch.randn(call.batch, call.heads, *shape, generator=generator).to(device, call.dtype) for shape in shapes
    ]
    query, key, value = (tensor.requires_grad_(call.backward) for tensor in operands)
    cotangent = torch.randn_like(query)

    def ours() -> list[Tensor]:
        a = attend(query, key, value, is_causal=call.causal)
        rows = [row for row in (a.output, a.log_normalizer, a.entropy) if row is not None]
        if not call.backward:
            return rows
        return [*rows, *torch.autograd.grad((rows[0] * cotangent).sum() + rows[2].sum(), operands)]

    def theirs() -> object:
        output = scaled_dot_product_attention(query, key, value, is_causal=call.causal)
        return torch.autograd.grad((output * cotangent).sum(), operands) if call.backward else output

    error = _largest_error(ours(), _definition(call, operands, cotangent))
    ratio, again = _compared(ours, theirs, device)
    return ServedCall(call.name, str(device), _kernel_names(call, operands), error, error <= TOLERANCES[call.dtype],
                      ratio, again, "SDPA")  # fmt: skip


def _definition(call: MeasuredCall, operands: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Output, log normaliser, entropy and gradients, from the matrix of logits in float64."""
    query, key, value = wide = [tensor.detach().double().requires_grad_(call.backward) for tensor in operands]
    logits = query @ key.mT / call.size**0.5
    if call.causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    G = logits.logsumexp(-1)
    weights = torch.exp(logits - G.unsqueeze(-1))
    entropy = -torch.where(weights > 0, weights * torch.log(weights.clamp(min=1e-300)), 0.0).sum(-1)
    rows = [weights @ value, G, entropy]
    if not call.backward:
        return rows
    return [*rows, *torch.autograd.grad((rows[0] * cotangent).sum() + entropy.sum(), wide)]


def _kernel_names(call: MeasuredCall, operands: list[Tensor]) -> str:
    """Name of the kernel, both if the backward pass has another."""
    scoring = Scoring(call.size**-0.5, right=0 if call.causal else None)
    ways = (False, True) if call.backward else (False,)
    query, key, value = (tensor.detach() for tensor in operands)
    names = [dispatch.serving(query, key, value, Sight(), scoring, backward=backward) for backward in ways]
    return ", ".join(dict.fromkeys(names))


# Filters --------------------------------------------------------------------------------------------------------------


def _served_filter(device: torch.device) -> ServedCall:
    """An IMM filter of three modes with 500 targets; derivatives are computed in torch, which is the rival."""
    generator = torch.Generator("cpu").manual_seed(0)
    eye = torch.eye(2, dtype=torch.float64, device=device)
    modes = [KalmanModel(0.9 * eye, noise * eye, eye, 0.5 * eye) for noise in (0.01, 0.1, 1.0)]
    transition = 0.05 + 0.85 * torch.eye(3, dtype=torch.float64, device=device)
    model, prior = SwitchingModel.of(modes, transition=transition), Prior(torch.zeros_like(eye[0]), eye)
    observations = torch.randn(500, 20, 2, generator=generator, dtype=torch.float64).to(device)
    differentiable = observations.clone().requires_grad_()

    def ours() -> list[Tensor]:
        result = imm(model, observations, prior)
        return [result.mean, result.log_mode_probability, result.log_likelihood]

    def theirs() -> list[Tensor]:
        result = imm(model, differentiable, prior)
        return [result.mean.detach(), result.log_mode_probability.detach(), result.log_likelihood.detach()]

    kernel = filtering_kernel((observations, eye), observations.shape[0] * observations.shape[1] * 3)
    name = "torch" if kernel is None else "CUDA (NVRTC)" if device.type == "cuda" else "numba"
    error = _largest_error(ours(), theirs())
    ratio, again = _compared(ours, theirs, device)
    return ServedCall(FILTER, str(device), name, error, error <= TOLERANCES[torch.float64],
                      ratio, again, "torch path")  # fmt: skip


# Comparison -----------------------------------------------------------------------------------------------------------


def _largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference relative to 1 + the largest entry; NaN if there is one."""
    errors = [
        ((one.double() - other.double()).abs().max() / (1 + other.double().abs().max())).item()
        for one, other in zip(results, expected, strict=True)
    ]
    return max(errors, key=lambda error: float("inf") if error != error else error)


def _compared(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, seconds: float = 0.4
) -> tuple[float, float]:
    """Least time of `ours` and of `theirs` measured again, over the least time of `theirs`; in turns."""
    calls = (theirs, ours, theirs)
    least = [float("inf")] * 3
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            least[index] = min(least[index], time.perf_counter() - start)
        rounds += 1
    return least[1] / least[0], least[2] / least[0]
