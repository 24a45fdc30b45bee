"""Calls of attention on a GPU from C++: a third of the time of Python, which is longer than a kernel on few tokens.

    first call of a kind      by Python, which compiles the kernels
    later calls               by cpp_calls.cpp, from what Python has recorded

cpp_calls.cpp is compiled when a GPU first needs it: by g++, in the background, in about 20 seconds, once for each
version of Python, torch and Triton; until then Python makes every call. Both ways launch the same kernels with the same
arguments. The library is kept beside Triton's compiled kernels. Without g++ or the headers of Python, calls stay in
Python: `problem` says why. GRADLOGZ_CPP=0 in the environment keeps all calls in Python.

Taken are calls without masks, whose forward pass hopper.py serves; gradients come from hopper_backward.py where it
takes them, else from Python.

Read next: operator.py (which asks first here), launching.py (what is recorded).
"""

import atexit
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..._paths import is_own
from ..._typing import Tensor
from ..optional import kernel_module
from .reference import Gradients, Statistics
from .scoring import Scoring


class InPython(NamedTuple):
    """How Python makes these calls: its backward pass, and the choice of a kernel for operands without masks."""

    pull_back: Callable[..., tuple[Tensor | None, ...]]
    kernel: Callable[[Tensor, Tensor, Tensor, Scoring, bool], Any]  # the last: of the backward pass


SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "gradlogz_cpp_calls"
# Seconds after which the lock of a process that compiles is taken for one that was left behind.
LONGEST_BUILD = 300


class _NotBuiltError(Exception):
    """Why the library cannot be built or used, a sentence."""


class _Library:
    """The compiled module: not asked for yet, on its way, there, or impossible."""

    module: ModuleType | None = None
    thread: threading.Thread | None = None
    problem: str | None = None


_library = _Library()


# Calls ----------------------------------------------------------------------------------------------------------------


class _Slot:
    """The recorded call of one kind, and whether it was looked for."""

    __slots__ = ("call", "closed")

    def __init__(self) -> None:
        self.call: Any = None
        self.closed = False


def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, statistics: bool) -> tuple[Tensor, ...] | None:
    """Output, log normaliser, entropy, variance, maximum and mean of a call that is known; None if it is not."""
    if _library.module is None:
        return None
    call = _slot(query, key, value, scoring, statistics).call
    if call is None or query.device.index != torch._C._cuda_getDevice() or _compiled_autograd():
        return None
    return _library.module.attend(call, query, key, value)


def record(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, statistics: bool, in_python: InPython) -> None:
    """Record a call that Python has just made, for the next ones of its kind."""
    if not _has_recorded_kernels(query.device):
        return
    slot = _slot(query, key, value, scoring, statistics)
    if slot.closed:
        return
    kernel = _kernel(query, key, value, scoring, in_python, False)
    if kernel is None:
        slot.closed = True
    elif _library.module is None:
        if _library.thread is None and _library.problem is None:
            _start_build()
    elif _are_aligned(query, key, value):  # else the next one may be
        slot.closed = True
        launch, plan = kernel.recorded(query, key, value, scoring, statistics=statistics)
        if launch is not None:
            backward = _Backward(scoring, in_python)
            slot.call = _library.module.Call(_in_cpp(_library.module, launch), plan, backward)


@cache
def _has_recorded_kernels(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _compiled_autograd() -> bool:
    """Return whether the backward pass will be traced by torch's compiler, which knows no nodes in C++."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def _slot(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, statistics: bool) -> _Slot:
    shapes, strides = (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())
    return _kind(query.dtype, query.device, shapes, strides, scoring, statistics)


@lru_cache(maxsize=1024)
def _kind(
    _dtype: torch.dtype, _device: torch.device, _shapes: Any, _strides: Any, _scoring: Scoring, _statistics: bool
) -> _Slot:
    return _Slot()


def _kernel(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, in_python: InPython, backward: bool) -> Any:
    """Return the module that serves a call, if it records launches of such sizes; else None."""
    if query.shape[-1] != value.shape[-1] or query.shape[-1] % 8:
        return None
    kernel = in_python.kernel(query, key, value, scoring, backward)
    return kernel if hasattr(kernel, "recorded") else None


def _are_aligned(*tensors: Tensor) -> bool:
    from .launching import is_aligned

    return all(map(is_aligned, tensors))


class _Backward:
    """Backward pass of a recorded call in Python, which records it for the next time."""

    def __init__(self, scoring: Scoring, in_python: InPython):
        self.scoring, self.in_python = scoring, in_python
        self.closed: set[Any] = set()

    def __call__(
        self, call: Any, saved: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...], usual: bool
    ) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value; `usual` calls are those that C++ would make if it knew them."""
        query, key, value, *results = saved
        tensors = query, key, value, None, None, None, None, *results
        grads = self.in_python.pull_back(tensors, cotangents, self.scoring, 0.0, needs_bias=False)[:3]
        if usual:
            self.record(call, query, key, value, Statistics(*results), Gradients(*cotangents[:5]))
        return grads

    def record(
        self, call: Any, query: Tensor, key: Tensor, value: Tensor, result: Statistics, gradients: Gradients
    ) -> None:
        """Record the kernels that have just computed these gradients, if those of hopper_backward.py did."""
        grad_output, module = gradients.output, _library.module
        assert grad_output is not None
        assert module is not None
        rows = sum(1 << i for i in (1, 2, 3) if gradients[i] is not None)
        kind = rows, grad_output.stride()
        if kind in self.closed:
            return
        self.closed.add(kind)
        kernel = _kernel(query, key, value, self.scoring, self.in_python, True)
        if kernel is None or not _are_aligned(query, key, value, grad_output):
            return
        coefficients = 2 if gradients.entropy is gradients.logit_variance is None else 4
        of_rows = kernel.recorded_coefficients(result, gradients)
        launch, plan = kernel.recorded(query, key, value, grad_output, self.scoring, coefficients)
        if of_rows is not None and launch is not None:
            launches = _in_cpp(module, of_rows), _in_cpp(module, launch)
            call.add_backward(rows, list(grad_output.stride()), *launches, plan, coefficients)


def _in_cpp(module: ModuleType, launch: Any) -> Any:
    *numbers, maps, parameters = launch
    return module.Launch(*numbers, [module.TensorMap(*each) for each in maps], parameters)


# The library ----------------------------------------------------------------------------------------------------------


def wait(seconds: float = 120.0) -> bool:
    """Compile the library if that was not done yet, and wait for it; return whether it is there."""
    if _library.module is None and _library.problem is None and _library.thread is None:
        _start_build()
    if _library.thread is not None:
        _library.thread.join(seconds)
    return _library.module is not None


def problem() -> str | None:
    """Why there is no library: a sentence for the reader of `gradlogz doctor`; None if there is one, or none yet."""
    return _library.problem


def _start_build() -> None:
    if os.environ.get("GRADLOGZ_CPP") == "0":
        _library.problem = "GRADLOGZ_CPP=0 is set."
        return
    _library.thread = threading.Thread(target=_build, name="gradlogz-cpp", daemon=True)
    _library.thread.start()


def _build() -> None:
    try:
        kernel_module("triton", "triton")  # whose cache is then this user's
        module = _loaded(_compiled())
        if torch.cuda.is_available():
            module.find_driver()
        _library.module = module
    except (OSError, ImportError, ValueError, RuntimeError, subprocess.SubprocessError, _NotBuiltError) as error:
        _library.problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _compiled() -> Path:
    """Return the path of the library; compile it unless it is there, by this process or another one."""
    path = _path()
    lock = path.with_suffix(".lock")
    while not _is_sound(path):
        try:
            with open(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            with suppress(FileNotFoundError):  # the other process has just ended
                if _is_left_behind(lock):
                    lock.unlink()
            time.sleep(0.2)
            continue
        remove = partial(lock.unlink, missing_ok=True)
        atexit.register(remove)
        try:
            _compile(path)
        finally:
            remove()
            atexit.unregister(remove)
    return path


def _is_left_behind(lock: Path) -> bool:
    """Return whether the process that compiles is gone, or takes too long."""
    if time.time() - lock.stat().st_mtime > LONGEST_BUILD:
        return True
    number = lock.read_text()
    if not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except OSError as error:  # or it is another user's
        return isinstance(error, ProcessLookupError)
    return False


def _compile(path: Path) -> None:
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or shutil.which(command[0]) is None:
        raise _NotBuiltError("No C++ compiler was found: install g++.")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise _NotBuiltError("The headers of Python were not found: install them (Debian: python3-dev).")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        process = subprocess.Popen([*command, *_options(), str(SOURCE), "-o", str(part), *_libraries()],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)  # fmt: skip
        stop = partial(_stop, process)
        atexit.register(stop)
        errors = process.communicate()[1]
        atexit.unregister(stop)
        if process.returncode:
            first = next((line for line in errors.splitlines() if "error" in line), errors[-300:])
            raise _NotBuiltError(f"{command[0]} failed: {first}")
        part.chmod(0o700)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        seal = part.with_suffix(".sha256")
        seal.write_text(_hash(part))
        part.replace(path)
        seal.replace(path.with_suffix(".sha256"))


def _stop(process: subprocess.Popen[str]) -> None:
    """End the compiler and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _options() -> list[str]:
    import triton
    from torch.utils.cpp_extension import include_paths

    cuda = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    folders = [*include_paths(), sysconfig.get_path("include"), str(cuda)]
    standard = "-std=c++20" if _torch_version() >= (2, 12) else "-std=c++17"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-O1", standard, abi, "-fPIC", "-shared", "-fvisibility=hidden", f"-DMODULE_NAME={NAME}"]
    return [*flags, *(part for folder in folders for part in ("-isystem", folder))]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def _path() -> Path:
    """Path of the library in Triton's cache: one for every source, machine, Python, torch and Triton."""
    import triton

    versions = sys.version, torch.__version__, torch.version.git_version, torch.__file__, triton.__version__
    name = hashlib.sha256(repr((SOURCE.read_bytes(), platform.machine(), *versions)).encode()).hexdigest()[:24]
    folder = Path(triton.knobs.cache.dir) / NAME
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(folder):
        raise _NotBuiltError(f"The folder {folder} is not only this user's: set TRITON_CACHE_DIR to one that is.")
    return folder / f"{name}.so"


def _is_sound(path: Path) -> bool:
    """Return whether the library is there as it was written, and only this user's."""
    try:
        return is_own(path) and path.with_suffix(".sha256").read_text() == _hash(path)
    except OSError:
        return False


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
