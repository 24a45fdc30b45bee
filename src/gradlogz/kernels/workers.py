"""Threads that run functions compiled by numba: the decorators, the threads, their memory.

    compiled            a function called only by compiled code
    compile_worker      a function of an address that a thread runs, cached on disk
    CachedFunction      a function of arrays, compiled at its first call and cached in the same way
    team().run          run one worker in several threads
    workspace.reserve   memory that is reused from call to call

Read next: attention/cpu.py and filters/cpu.py (the callers), simd.py (the vector instructions).
"""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from numba import cfunc, njit, types

from .compiled_cache import entry_of, make_sound, seal

LINE = 64  # bytes of a cache line

# For functions that only compiled code calls. Python calls workers, which are cached on disk.
compiled: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compile_worker(function: Callable[[int], None]) -> Any:
    """Compile a function to a C function, cached on disk if a cache folder of this user is writable.

    Law: tests/faults/test_a_damaged_cache_of_kernels_costs_only_time.py.
    """
    kind = types.void(types.int64)
    try:
        entry = entry_of(function)
        if make_sound(entry):
            worker = cfunc(kind, error_model="numpy", cache=True)(function)
            if not worker.cache_hits:
                seal(entry)
            return worker
    except Exception:  # any trouble with the cache, also a full disk; an error of the compiler comes again below
        pass
    return cfunc(kind, error_model="numpy")(function)


class CachedFunction:
    """A function of arrays, compiled for the types of its arguments; cached on disk as workers are.

    A call may be repeated: results are written to arrays of the arguments.
    Law: tests/faults/test_a_damaged_cache_of_kernels_costs_only_time.py.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._known, self._entry = function, 0, None
        with suppress(Exception):  # any trouble with the cache
            entry = entry_of(function)
            self._entry = entry if make_sound(entry) else None
        self.compiled: Any = njit(error_model="numpy", cache=self._entry is not None)(function)

    def __call__(self, *arguments: Any) -> Any:
        try:
            result = self.compiled(*arguments)
            if self._entry is not None and len(self.compiled.overloads) != self._known:
                self._known = len(self.compiled.overloads)
                if self.compiled.stats.cache_misses:
                    seal(self._entry)
        except Exception:  # such as a full disk; an error of the compiler comes again below
            if self._entry is None:
                raise
            self._entry, self.compiled = None, njit(error_model="numpy")(self._function)
            result = self.compiled(*arguments)
        return result


class Team:
    """Threads of this process: those of torch if its OpenMP library can be called, otherwise a pool.

    The threads of torch spin for a while after each operation and keep other threads off their cores. A forked child
    has none of its parent's threads, which OpenMP does not notice: it uses the pool.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.torch_parallel = _gomp_parallel()
        self.pool: ThreadPoolExecutor | None = None

    def run(self, worker: Any, threads: int, plan: int) -> None:
        """Run `worker(plan)` in that many threads, including the calling one, and wait."""
        if self.pid != os.getpid():
            self.pid, self.torch_parallel, self.pool = os.getpid(), None, None
        if threads == 1:
            worker.ctypes(plan)
        elif self.torch_parallel is not None:
            self.torch_parallel(worker.address, plan, threads, 0)
        else:
            self.pool = self.pool or ThreadPoolExecutor(os.cpu_count(), "gradlogz")
            others = [self.pool.submit(worker.ctypes, plan) for _ in range(threads - 1)]
            worker.ctypes(plan)
            for other in others:
                other.cancel() or other.result()  # no tasks are left: a thread that has not started need not


def _gomp_parallel() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library that torch has loaded, if any."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        libraries = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp5" in line}
        # Other packages may load another OpenMP library, with its own threads.
        (library,) = [name for name in libraries if Path(torch.__file__).parent in Path(name).parents] or libraries
        parallel = ctypes.CDLL(library).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


class Workspace(threading.local):
    """Memory of each calling thread, reused from call to call: fresh pages cost more than a small problem."""

    memory: Any = numpy.zeros(0, numpy.uint8)
    address = 0  # its first cache line

    def reserve(self, size: int) -> int:
        if self.memory.size < size + LINE:
            self.memory = numpy.zeros(size + LINE, numpy.uint8)
            self.address = -(-self.memory.ctypes.data // LINE) * LINE
        return self.address


team = cache(Team)
workspace = Workspace()
