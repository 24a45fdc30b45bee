"""CUDA sources to kernels: NVIDIA's compiler at run time and the driver, both of which come with torch.

    compile_source     a function of a source, for one device; None where there is no compiler or it refuses
    Kernel             what was compiled; `launch` puts it on torch's current stream

No headers are read, so that no toolkit need be installed (torch.utils.cpp_extension looks for one).

Read next: gpu.py, who calls.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch


class Kernel:
    """A function of one struct that is passed by value, in the memory of one device."""

    def __init__(self, function: ctypes.c_void_p, device: torch.device) -> None:
        self.function, self.device = function, device

    def launch(self, blocks: int, threads: int, argument: int) -> bool:
        """Put it on torch's current stream of the device, without waiting for it; whether the driver took it."""
        addresses = (ctypes.c_void_p * 1)(argument)
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = (blocks, 1, 1, threads, 1, 1, 0)
            return _driver().cuLaunchKernel(self.function, *sizes, stream, addresses, None) == 0


def compile_source(source: str, name: str, device: torch.device) -> Kernel | None:
    """Machine code for a device, in torch's context; the name is that of an extern "C" function."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        image = _compiled(source, f"--gpu-architecture=sm_{major}{minor}", "--std=c++17")
    except (OSError, AttributeError):  # no library, or none of NVIDIA's
        return None
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the context of the device is there and current
        failed = image is None or _driver().cuModuleLoadData(ctypes.byref(module), image)
        failed = failed or _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    return None if failed else Kernel(function, device)


def _compiled(source: str, *options: str) -> bytes | None:
    """Machine code."""
    library, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gradlogz.cu", 0, None, None)
    failed = failed or library.nvrtcCompileProgram(program, len(options), given)
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
    """The one of torch's CUDA: by the library through which torch reaches it, or where the system looks."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"))
    except OSError:
        return ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")
