"""Accesses by which Triton starts and ends the parts of a warp-specialised kernel, from compiled kernels.

Triton keeps a byte for each warp in shared memory: the part that it runs next. One warpgroup writes the bytes, the
others read them behind a barrier of all warps, which racecheck does not follow. No kernel here reads other bytes:
tests/kernels/test_the_hopper_kernel_overlaps.py.
"""

import re
import subprocess
from pathlib import Path

import triton
from triton import knobs

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(LDS\.U8|STS\.64) ")


def warp_state_pairs(kernels: set[str]) -> set[tuple[str, str]]:
    """Pairs of places (read, write), written as racecheck does, in the compiled kernels of Triton's cache."""
    pairs = set()
    for kernel in kernels:
        for cubin in Path(knobs.cache.dir).glob(f"*/{kernel}.cubin"):
            code = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
            accesses = [(f"{kernel}+{int(place, 16):#x}", name) for place, name in INSTRUCTION.findall(code)]
            reads, writes = ([p for p, name in accesses if name == kind] for kind in ("LDS.U8", "STS.64"))
            pairs |= {(read, write) for read in reads for write in writes}
    return pairs
