"""Compile all Triton kernels of attention and losses for a GPU that need not be there; print their names as JSON.

python compiled_triton_kernels.py

A process of its own: Triton must not be in its interpreter, which accepts programs that the compiler refuses.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from gradlogz.kernels.attention import decoding, extreme_keys_gpu, gpu, head_sums_gpu
from gradlogz.kernels.attention.launching import Kernel
from gradlogz.kernels.attention.reference import Gradients
from gradlogz.kernels.attention.scoring import Scoring, Sight
from gradlogz.kernels.losses import row_loss, tiled_rows

TARGET = GPUTarget("cuda", 90, 32)
NAMES: list[str] = []


def compile_only(kernel: Kernel, _programs, _stream, tiled, pointers, numbers) -> None:
    """In the place of Kernel.launch."""
    described = [describe(t) for describe, t in zip(kernel.descriptors, tiled, strict=True)]
    backend = make_backend(TARGET)
    bind = create_function_from_signature(kernel.function.signature, kernel.function.params, backend)
    arguments = (*described, *pointers, *numbers, *kernel.constants)
    bound, specialization, options = bind(*arguments, **kernel.options, debug=False)
    options, signature, constants, attributes = kernel.function._pack_args(
        backend, kernel.options, bound, specialization, options
    )
    source = ASTSource(kernel.function, signature, constants, attributes)
    triton.compile(source, target=TARGET, options=options.__dict__)
    NAMES.append(kernel.function.__name__)


def call_every_kernel(sight: Sight, scoring: Scoring, dtype: torch.dtype, size: int) -> None:
    query = torch.zeros(2, 4, 150, size, dtype=dtype)
    key, value = (torch.zeros(2, 2, 150, size, dtype=dtype) for _ in range(2))
    result = gpu.forward(query, key, value, sight, scoring)
    row = torch.zeros(2, 4, 150)
    per_row = gpu.coefficients(result, Gradients(result.output, row, row, row, None))
    gpu.backward(query, key, value, sight, scoring, per_row, result.output, needs_bias=sight.bias is not None)
    extreme_keys_gpu.extreme_keys(query, key, sight, scoring)


def call_every_loss() -> None:
    """Each loss, and sizes that are 1 or no whole tiles."""
    labels, vectors = torch.zeros(200, dtype=torch.long), torch.zeros(200, 64)
    for kind in tiled_rows.TILINGS:
        problem = row_loss.Problem(kind, labels=(labels, labels))
        tiled_rows.sum_and_gradients(vectors, vectors, None, problem, 1.0, 1.0, (True, True, False), torch.bfloat16)
    one = torch.zeros(1, 16), torch.zeros(1, 16), torch.zeros(1)
    plain = row_loss.Problem(row_loss.ONE, mask=torch.ones(1, 1, dtype=torch.bool))
    tiled_rows.sum_and_gradients(*one, plain, 1.0, 1.0, (True, True, True), torch.bfloat16)


if __name__ == "__main__":
    Kernel.launch = compile_only
    causal, window = Scoring(0.1, None, None, 0), Scoring(0.1, 5.0, 20, 3)
    segments = torch.zeros(2, 150, dtype=torch.long)
    call_every_kernel(Sight(segments=segments), causal, torch.bfloat16, 64)
    call_every_kernel(Sight(torch.zeros(1, 4, 150, 150), torch.ones(2, 1, 1, 150).bool()), window, torch.float32, 64)
    query, key = (torch.zeros(1, 2, m, 64, dtype=torch.bfloat16) for m in (1, 150))
    for sight in (Sight(), Sight(segments=segments[:1])):
        decoding.forward(query, key, key, sight, causal)
    rows = [torch.zeros(2, 4, 150) for _ in range(4)]
    query, key = (torch.zeros(2, h, 150, 64, dtype=torch.bfloat16) for h in (4, 2))
    for left in (None, 20):
        head_sums_gpu.head_sums(query, key, key, tuple(rows), torch.zeros(150, dtype=torch.float64), 0.1, left)
    one = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)  # numbers that are 1 are constants for Triton
    head_sums_gpu.head_sums(one, one, one, (torch.zeros(1, 1, 1),) * 4, torch.zeros(1, dtype=torch.float64), 0.1, None)
    call_every_loss()
    json.dump(sorted(set(NAMES)), sys.stdout)
