"""Compilation and launch of CUDA sources with NVRTC and the driver, both of which come with torch.

    compile_source     compile a function of a source for one device; None if there is no compiler or it fails
    CudaKernel         a compiled function; `launch` runs it on torch's current stream

No headers are used, so no CUDA toolkit is needed (torch.utils.cpp_extension needs one).

Read next: gpu.py (the caller).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch


class CudaKernel:
    """A compiled function of one struct, passed by value, loaded on one device."""

    def __init__(self, function: ctypes.c_void_p, device: torch.device) -> None:
        self.function, self.device = function, device

    def launch(self, blocks: int, threads: int, argument: int) -> bool:
        """Launch on torch's current stream of the device without synchronising; returns True on success."""
        addresses = (ctypes.c_void_p * 1)(argument)
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = (blocks, 1, 1, threads, 1, 1, 0)
            return _driver().cuLaunchKernel(self.function, *sizes, stream, addresses, None) == 0


def compile_source(source: str, name: str, device: torch.device) -> CudaKernel | None:
    """Compile a source for a device, in torch's context; `name` is that of an extern "C" function."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        image = _compiled(source, f"--gpu-architecture=sm_{major}{minor}", "--std=c++17")
    except (OSError, AttributeError):  # no library, or not NVIDIA's
        return None
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context of the device current
        failed = image is None or _driver().cuModuleLoadData(ctypes.byref(module), image)
        failed = failed or _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    return None if failed else CudaKernel(function, device)


def _compiled(source: str, *options: str) -> bytes | None:
    """Compile a source to machine code; None if it fails."""
    library, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gradlogz.cu", 0, None, None)
    failed = failed or library.nvrtcCompileProgram(program, len(options), arguments)
    failed = failed or library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    failed = failed or library.nvrtcGetCUBIN(program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return None if failed else image.raw


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version: through torch's own library, or from the system path."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"))
    except OSError:
        return ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")
