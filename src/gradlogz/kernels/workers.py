"""Functions that numba compiles for threads of this process: the decorator, the threads, the memory they work in.

    compiled            a function that compiled code alone calls
    compile_worker      a function of an address that a thread runs, kept on disk
    team().run          so many threads that run one worker
    workspace.reserve   memory kept from call to call

Read next: attention/cpu.py and filters/cpu.py (the callers), simd.py (the vector instructions).
"""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from numba import cfunc, njit, types

LINE = 64  # bytes of a cache line

# Called by compiled code alone; what Python calls are workers, and they are what is kept on disk.
compiled: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compile_worker(function: Callable[[int], None]) -> Any:
    """A C function, kept on disk where any folder for it can be written."""
    kind = types.void(types.int64)
    try:
        return cfunc(kind, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return cfunc(kind, error_model="numpy")(function)


class Team:
    """The threads of this process: those of torch where its OpenMP library can be asked, else a pool of our own.

    Threads of torch spin for a while after an operation of torch: others would wait for the cores they hold.
    A forked child has none of its parent's threads, and OpenMP does not notice: there, the pool is used.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.of_torch = _parallel_of_torch()
        self.pool: ThreadPoolExecutor | None = None

    def run(self, worker: Any, threads: int, plan: int) -> None:
        """Let `worker(plan)` be run by so many threads, this one among them, and wait."""
        if self.pid != os.getpid():
            self.pid, self.of_torch, self.pool = os.getpid(), None, None
        if threads == 1:
            worker.ctypes(plan)
        elif self.of_torch is not None:
            self.of_torch(worker.address, plan, threads, 0)
        else:
            self.pool = self.pool or ThreadPoolExecutor(os.cpu_count(), "gradlogz")
            others = [self.pool.submit(worker.ctypes, plan) for _ in range(threads - 1)]
            worker.ctypes(plan)
            for other in others:
                other.cancel() or other.result()  # no tasks are left: who has not begun need not


def _parallel_of_torch() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library that torch has loaded, if any."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        libraries = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp5" in line}
        # Other packages bring an OpenMP of their own, with threads of its own.
        (library,) = [name for name in libraries if Path(torch.__file__).parent in Path(name).parents] or libraries
        parallel = ctypes.CDLL(library).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


class Workspace(threading.local):
    """Memory kept from call to call by each thread that calls: fresh pages cost more than a small problem."""

    memory: Any = numpy.zeros(0, numpy.uint8)
    address = 0  # its first cache line

    def reserve(self, size: int) -> int:
        if self.memory.size < size + LINE:
            self.memory = numpy.zeros(size + LINE, numpy.uint8)
            self.address = -(-self.memory.ctypes.data // LINE) * LINE
        return self.address


team = cache(Team)
workspace = Workspace()
