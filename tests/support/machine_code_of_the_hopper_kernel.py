"""Compile the Hopper kernels ahead of time, on any machine, and print what their machine code has, as JSON.

python machine_code_of_the_hopper_kernel.py

A process of its own: Triton must not be in its interpreter, which the suite uses where there is no GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import MockTensor, create_function_from_signature

from gradlogz.kernels.attention import hopper, hopper_backward
from gradlogz.kernels.attention.hopper_tiles import by_rows

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGET = GPUTarget("cuda", 90, 32)
# Head size, whether some tiles need a mask, the window, and whether documents are packed.
FORWARD = {
    "128, causal": (128, True, None, 0),
    "64, window": (64, True, 511, 0),
    "128, segments": (128, True, None, 0, True),
}
# Head size, whether there are masks, coefficients of a row, and the window.
BACKWARD = {
    "128, causal, backward": (128, True, 4, None, 0),
    "64, full, backward": (64, False, 2, None, None),
}


def compiled(kernel, tiled: list, pointers: list, numbers: tuple, constants: dict) -> bytes:
    backend = make_backend(TARGET)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*tiled, *pointers, *numbers, **constants, num_warps=4, debug=False)
    packed = kernel._pack_args(backend, {"num_warps": 4}, bound, specialization, options)
    options, signature, constexprs, attributes = packed
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=TARGET, options=options.__dict__).asm["cubin"]


def forward(size: int, edges: bool, left: int | None, right: int | None, packed: bool = False) -> bytes:
    operand = torch.empty(2, 4, 256, size, dtype=torch.bfloat16)
    tiled = [by_rows(rows, size, torch.bfloat16)(operand) for rows in (64, 128, 128, 64)]
    pointers = [*[MockTensor(torch.float32)] * 5, MockTensor(torch.int32)]
    pointers += [MockTensor(torch.int64), MockTensor(torch.int32)] if packed else [None, None]
    numbers = 10, 256, 256, 0.1, 4, 8, left, right, 0, 0
    constants = {"GROUP": 1, "EDGES": edges, "STATISTICS": True}
    return compiled(hopper._attention, tiled, pointers, numbers, constants)


def backward(size: int, edges: bool, coefficients: int, left: int | None, right: int | None) -> bytes:
    operand = torch.empty(2, 4, 256, size, dtype=torch.bfloat16)
    queries, slots = (64, 2) if size == 128 else (128, 1)
    tiled = [by_rows(r, size, torch.bfloat16)(operand) for r in (queries, 64, 64, queries, 64, 64)]
    tiled.append(hopper_backward._halves(operand.float()))
    pointers = [MockTensor(torch.float32), MockTensor(torch.int32)]
    numbers = 66, 16, 8, 8, 256, 0.1, 0.1, 4, 2048, left, right
    constants = {"GROUP": 1, "EDGES": edges, "COEFFICIENTS": coefficients, "DQ_SLOTS": slots}
    return compiled(hopper_backward._backward, tiled, pointers, numbers, constants)


def instructions(cubin: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [found.strip() for found in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][^;]*);", listing)]


def facts(code: list[str]) -> dict[str, object]:
    """Spills, and the exponentials that each consumer takes between its two waits for products in flight."""
    overlapped, inside = [], None
    for instruction in code:
        name = instruction.split()[0]
        if instruction.startswith("WARPGROUP.DEPBAR") and instruction.endswith("0x1"):
            inside = 0
        elif instruction.startswith("WARPGROUP.DEPBAR") and inside is not None:
            overlapped.append(inside)
            inside = None
        elif name == "MUFU.EX2" and inside is not None:
            inside += 1
    return {
        "spills": sum(i.split()[0].split(".")[0] in ("LDL", "STL") for i in code),
        "overlapped exponentials": overlapped,
        "products": sum(i.startswith("HGMMA") for i in code),
        "bytes read from shared memory": sum(i.startswith("LDS.U8") for i in code),
    }


if __name__ == "__main__":
    cubins = {name: forward(*variant) for name, variant in FORWARD.items()}
    cubins |= {name: backward(*variant) for name, variant in BACKWARD.items()}
    json.dump({name: facts(instructions(cubin)) for name, cubin in cubins.items()}, sys.stdout)
