# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Common parts of the kernels for Hopper GPUs: exponentials, the mask of a tile, and descriptors of tiles.

Read next: hopper.py (forward), hopper_backward.py (backward).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..._typing import Tensor

COEFS = ['0f3D635B73', '0f3E75FC8C', '0f3F317214', '0f3F800001']
LOG2_E = 1.4426950408889634
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@gluon.jit
def exp2(x):
    """2^x in one instruction; Gluon's own exp2 scales small results."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _exponentials_of(count):
    lines = ["{ .reg .f32 t, f, p; .reg .b32 i, j;"]
    for k in range(count - 1):
        lines += [f"ex2.approx.ftz.f32 ${k}, ${2 * count + k};", f"mov.f32 ${count + k}, ${2 * count + k};"]
    last, x = f"${count - 1}", f"${2 * count - 1}"
    lines += [
        f"max.NaN.f32 {x}, ${3 * count - 1}, 0fC2FC0000;",
        f"add.rn.f32 t, {x}, 0f4B400000;",
        "sub.rn.f32 f, t, 0f4B400000;",
        f"sub.rn.f32 f, {x}, f;",
        "fma.rn.f32 p, f, 0f3AAE0472, 0f3C1E862A;",
    ]
    for c in COEFS:
        lines.append(f"fma.rn.f32 p, p, f, {c};")
    lines += ["mov.b32 i, t; mov.b32 j, p; shl.b32 i, i, 23; add.s32 j, j, i;", f"mov.b32 {last}, j; }}"]
    return " ".join(lines)


@gluon.constexpr_function
def _operands_of(count):
    return ",".join(["=f"] * (2 * count) + ["f"] * count)


@gluon.jit
def exp2_in_part(x, COUNT: gl.constexpr):
    CODE: gl.constexpr = _exponentials_of(COUNT)
    OPERANDS: gl.constexpr = _operands_of(COUNT)
    return gl.inline_asm_elementwise(CODE, OPERANDS, [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=COUNT)


@gluon.jit
def hide_columns(tile, first, last, HIDDEN: gl.constexpr):
    """Write HIDDEN into the columns outside first .. last of their row; without `first`, into those after last.

    A thread holds two adjacent columns in every eight, of two rows. What depends on the thread is on the side of the
    row in the comparison; the other side is a constant of the instruction instead of a register for each column.
    """
    R: gl.constexpr = tile.shape[0]
    C: gl.constexpr = tile.shape[1]
    t = tile.reshape([R, C // 8, 4, 2])
    L: gl.constexpr = t.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    eight = gl.arange(0, C // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    two = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    column = 8 * eight.expand_dims(0).expand_dims(2).expand_dims(3) + two.expand_dims(0).expand_dims(1).expand_dims(2)
    offset = 2 * thread.expand_dims(0).expand_dims(1).expand_dims(3)
    last = gl.convert_layout(last, ROW, assert_trivial=True).expand_dims(1).expand_dims(2).expand_dims(3)
    visible = column <= last - offset
    if first is not None:
        first = gl.convert_layout(first, ROW, assert_trivial=True).expand_dims(1).expand_dims(2).expand_dims(3)
        visible = visible & (column >= first - offset)
    return gl.convert_layout(gl.where(visible, t, HIDDEN).reshape([R, C]), tile.type.layout, assert_trivial=True)


def by_rows(rows: int, size: int, dtype: torch.dtype) -> Callable[[Tensor], TensorDescriptor]:
    """Function that describes a tensor [b, h, n, d] by tiles [rows, size]; the size is padded to 64 or 128."""
    block = [1, 1, rows, 64 if size <= 64 else 128]
    return partial(_describe, block=block, layout=gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[dtype]))


def _describe(tensor: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, layout)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors: of programs that run at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count
