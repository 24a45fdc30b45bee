"""The diagnosis of a machine: what is installed, which devices there are, and how they are served.

Read next: records.py (the result), kernel_calls.py (the calls), packages.py (the extras).
"""

import os
import platform
from collections.abc import Callable

import torch

from ..kernels.attention import cpp_calls
from .kernel_calls import number_of_calls, served_calls
from .packages import installed, packages
from .records import Device, Diagnosis


def diagnose(progress: Callable[[int, int], None] | None = None) -> Diagnosis:
    """Measure all calls on the CPU and on the first GPU; a few seconds, more if kernels are compiled first."""
    there = [torch.device("cpu")]
    if torch.cuda.is_available():
        there.append(torch.device("cuda", torch.cuda.current_device()))
    from_cpp = _calls_from_cpp()
    total, calls = sum(map(number_of_calls, there)), []
    for device in there:
        for call in served_calls(device):
            calls.append(call)
            if progress is not None:
                progress(len(calls), total)
    return Diagnosis({**_versions(), **from_cpp}, packages(), _devices(), calls)


def _calls_from_cpp() -> dict[str, str]:
    """Return whether calls of attention are made from C++; compile the library where a GPU uses it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or installed("triton") is None:
        return {}
    return {"attention from C++": "yes" if cpp_calls.wait() else f"no: {cpp_calls.problem() or 'still compiling'}"}


def _versions() -> dict[str, str]:
    compilers = {name: installed(name) or "not installed" for name in ("numba", "triton")}
    cuda = torch.version.cuda or "none (CPU build)"
    names = {"gradlogz": installed("gradlogz") or "from sources", "Python": platform.python_version()}
    return {**names, "torch": torch.__version__, "CUDA of torch": cuda, **compilers, "system": platform.platform()}


def _devices() -> list[Device]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [Device("cpu", f"{platform.machine()}, {cores} cores; threads of torch: {torch.get_num_threads()}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        kind = f"compute capability {properties.major}.{properties.minor}"
        devices.append(Device(f"cuda:{index}", f"{properties.name}, {memory}, {kind}"))
    return devices
