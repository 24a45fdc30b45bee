"""Launch of Triton kernels by their handles: ten microseconds of Python instead of a hundred.

For every launch Triton binds the arguments, looks the kernel up by their properties and encodes a tensor map for each
descriptor. Between two calls with operands of equal sizes, strides and alignment only the addresses differ: a Kernel
looks up once and then sends addresses and the same numbers to Triton's launcher in C.

    kernel = Kernel(function, constants, options, blocks)
    kernel.launch(programs, stream, tiled, pointers, numbers)      function(*tiled, *pointers, *numbers, *constants)

The caller holds one Kernel for each kind of call, and the kind includes all that Triton specialises: which arguments
are None, numbers that are 1 or multiples of 16, pointers that are multiples of 16 bytes. The handle is used with
Triton 3.6; another version launches as Triton does, more slowly.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton

from ..._typing import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# The version whose launcher is called directly.
KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
# For one descriptor: tensor maps by address, their other arguments, and the sizes and strides passed beside.
TensorMaps = tuple[dict[int, Any], tuple[Any, ...], list[int]]
# Tensor maps that a kernel remembers for each operand: a training loop reuses its addresses.
REMEMBERED_ADDRESSES = 1024


class RecordedLaunch(NamedTuple):
    """All of a launch but its addresses, as cpp_calls.cpp takes it."""

    function: int
    programs: int
    threads: int
    shared_bytes: int
    cooperative: bool
    maps: list[tuple[Any, ...]]  # swizzle, size and type of an element, tile, sizes, strides
    parameters: list[tuple[str, Any]]  # ("map", operand), ("address", operand) or (type, number)


class Kernel:
    """A kernel with its constants for one kind of call."""

    def __init__(
        self,
        function: Any,
        constants: tuple[Any, ...],
        options: dict[str, int],
        descriptors: tuple[Callable[[Tensor], Any], ...] = (),
    ):
        self.function, self.constants, self.options, self.descriptors = function, constants, options, descriptors
        self.run: Any = None
        self.handle: tuple[Any, ...] = ()
        self.maps: list[TensorMaps] = []
        self.signature: list[str] = []  # types of all arguments

    def launch(
        self,
        programs: int,
        stream: int,
        tiled: Sequence[Tensor],
        pointers: Sequence[Tensor | None],
        numbers: tuple[Any, ...],
    ) -> None:
        """Launch the kernel; `tiled` are the tensors that it reads and writes by tiles, through descriptors."""
        if self.run is None:
            described = [describe(t) for describe, t in zip(self.descriptors, tiled, strict=True)]
            start = self.function[(programs,)]
            compiled = start(*described, *pointers, *numbers, *self.constants, **self.options)
            if compiled is not None and KNOWN_LAUNCHER:  # it is None in Triton's interpreter
                self._remember(compiled, described)
            return
        arguments: list[Any] = []
        for tensor, (known, form, sizes) in zip(tiled, self.maps, strict=True):
            place = tensor.data_ptr()
            encoded = known.get(place)
            if encoded is None:
                if len(known) >= REMEMBERED_ADDRESSES:
                    known.clear()
                encoded = known[place] = _encode(place, *form)
            arguments.append(encoded)
            arguments += sizes
        arguments += [None if t is None else t.data_ptr() for t in pointers]
        self.run(programs, 1, 1, stream, *self.handle, *arguments, *numbers, *self.constants)

    def recorded(self, programs: int, pointers: int, numbers: tuple[Any, ...]) -> RecordedLaunch | None:
        """The launch with this number of pointers; None before the first one, and for unknown versions of Triton."""
        if self.run is None:
            return None
        function, cooperative, _, _, _, (warps, clusters, shared_bytes), *_ = self.handle
        if clusters != 1:
            return None
        parameters: list[tuple[str, Any]] = []
        values = (*self.maps, *[None] * pointers, *numbers, *self.constants)
        for operand, (kind, value) in enumerate(zip(self.signature, values, strict=True)):
            if operand < len(self.maps):
                parameters.append(("map", operand))
                sizes = value[2]  # and as many strides
                rank = len(sizes) // 2
                parameters += [("i32", size) for size in sizes[:rank]] + [("i64", step) for step in sizes[rank:]]
            elif kind.startswith("*"):
                parameters.append(("address", operand))
            elif kind != "constexpr":
                parameters.append((kind, value))
        maps = [form[:-1] for _, form, _ in self.maps]
        return RecordedLaunch(function, programs, 32 * warps, shared_bytes, bool(cooperative), maps, parameters)

    def _remember(self, compiled: Any, described: list[Any]) -> None:
        """Save the launcher in C, its arguments after grid and stream, and the form of each tensor map."""
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            return  # Triton allocates it at each launch
        launch = run.launch
        maps: list[TensorMaps] = []
        if described:
            metadata = compiled.metadata.tensordesc_meta
            if not metadata or any(m is None for m in metadata):
                return
            element = triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST
            for m, d in zip(metadata, described, strict=True):
                shape, strides = list(d.shape), list(d.strides)
                form = m["swizzle"], m["elem_size"], element[m["elem_type"]], m["block_size"], shape, strides, 0
                maps.append(({}, form, [*shape, *strides]))
            names = launch.__code__.co_freevars
            launch = launch.__closure__[names.index("launcher")].cell_contents
        cooperative = run.launch_cooperative_grid, run.launch_pdl
        self.signature = list(compiled.src.signature.values())
        self.handle = (compiled.function, *cooperative, None, None, compiled.packed_metadata, None, None, None)
        self.maps = maps
        self.run = launch  # last: another thread may have launched meanwhile


def _encode(*arguments: Any) -> Any:
    return triton.runtime.driver.active.utils.fill_tma_descriptor(*arguments)


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Make the device of the first argument, a tensor or a tuple of tensors, the current one."""

    @wraps(function)
    def launch(*arguments: P.args, **options: P.kwargs) -> R:
        first: Any = arguments[0]
        index = (first if isinstance(first, Tensor) else first[0]).device.index
        if index is None or index == torch._C._cuda_getDevice():  # None in Triton's interpreter
            return function(*arguments, **options)
        with torch.cuda.device(index):
            return function(*arguments, **options)

    return launch


def current_stream(device: torch.device) -> int:
    """Handle of the current stream of a device; 0 in Triton's interpreter."""
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)


def kept(plan: Tensor, device: torch.device) -> Tensor:
    """Copy a plan, which stays for later calls, to a device.

    A pass of torch's compiler may run in the memory of a CUDA graph, in which nothing may stay: that is the memory of
    its thread, so that the plan is copied by another one.
    """
    if "torch._inductor.cudagraph_trees" not in sys.modules:
        return plan.to(device)
    with ThreadPoolExecutor(1) as other:
        return other.submit(plan.to, device).result()


def empty_output(like: Tensor, size: int) -> Tensor:
    """Empty tensor [..., size] with the order of dimensions of `like` in memory, readable by descriptors."""
    if size == like.shape[-1] and size * like.element_size() % 16 == 0:
        return torch.empty_like(like)
    return _empty_aligned(like, size)


def _empty_aligned(like: Tensor, size: int) -> Tensor:
    """Empty tensor with rows of `size` that start at multiples of 16 bytes, as descriptors require."""
    step = 16 // like.element_size()
    return like.new_empty((*like.shape[:-1], -(-size // step) * step))[..., :size]


def dense(tensor: Tensor) -> Tensor:
    """Without the padding of _empty_aligned."""
    return tensor if tensor.shape[-1] * tensor.element_size() % 16 == 0 else tensor.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """Make rows start at multiples of 16 bytes, as descriptors require; copies only if they do not."""
    return tensor if is_aligned(tensor) else _empty_aligned(tensor, tensor.shape[-1]).copy_(tensor)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows start at multiples of 16 bytes, as descriptors require."""
    batch, head, row, last = tensor.stride()
    unsupported = last != 1 or not (batch and head and row) or (batch | head | row) * tensor.element_size() % 16
    return not unsupported and tensor.data_ptr() % 16 == 0


def empty_rows(query: Tensor, *, separate: bool) -> tuple[Tensor, ...]:
    """Empty log normaliser, entropy, variance, maximum and mean of every row, in one piece of memory or separate."""
    b, h, m, _ = query.shape
    strides = b * h * m, h * m, m, 1
    if separate:
        empty = torch.empty_strided((b, h, m), strides[1:], dtype=torch.float32, device=query.device)
        return empty, *(torch.empty_like(empty) for _ in range(4))
    return torch.empty_strided((5, b, h, m), strides, dtype=torch.float32, device=query.device).unbind()
