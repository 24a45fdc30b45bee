"""The Hopper kernel of attention in plain Python: its own source, in which a wait for a barrier is a `yield`.

Tensors are not computed. What is computed are barriers, slots of shared memory, and which tiles meet which.
"""

import ast
import inspect
import random
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from gradlogz.kernels.attention import hopper

# Functions whose source is run, and those in their place that compute tensors alone.
SIMULATED = "_place", "_segment_span", "_tiles_of_keys", "_load", "_produce", "_step", "_consume", "_store_output"
TENSOR_FUNCTIONS = (
    "_pieces", "_joined", "_largest", "_exponentials", "_sum_of_thread", "_hold", "_rescale", "_store_statistics",
    "fence_async_shared", "exp2",
)  # fmt: skip


class Unknown:
    """A tensor, or several: every operation gives an unknown one."""

    shape = (64, 32)

    def __getattr__(self, name: str) -> "Unknown":
        return self

    def __call__(self, *_: Any, **__: Any) -> "Unknown":
        return self

    def __getitem__(self, _: Any) -> "Unknown":
        return self

    def __iter__(self) -> Iterator["Unknown"]:  # sums of a piece
        return iter((self,) * 4)

    def __len__(self) -> int:  # pieces of a tile
        return 4

    def __bool__(self) -> bool:
        raise AssertionError("a branch of the kernel depends on a tensor")


def _unknown(self: Any, *_: Any) -> "Unknown":
    return self


for _operation in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "and", "or", "lt", "gt", "le", "ge"):
    setattr(Unknown, f"__{_operation}__", _unknown)
UNKNOWN = Unknown()


class Pointer:
    """An address in a list of integers."""

    def __init__(self, numbers: list[int], place: int = 0) -> None:
        self.numbers, self.place = numbers, place

    def __add__(self, step: Any) -> Any:
        return UNKNOWN if isinstance(step, Unknown) else Pointer(self.numbers, self.place + step)


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived, and the next one begins."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.phases = count, count, 0

    def arrive(self) -> None:
        assert self.missing > 0
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phases = self.count, self.phases + 1

    def has_ended(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Slot:
    """A tile of shared memory and what was loaded last; a slot seen through a reshape is the slot."""

    def __init__(self) -> None:
        self.content: Any = None

    def reshape(self, *_: Any) -> "Slot":
        return self

    permute = reshape

    def store(self, _: Any) -> None: ...


class Buffer:
    """Slots of shared memory, or barriers."""

    shape, dtype = (1, 1, 1, 1, 64), UNKNOWN

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def index(self, i: int) -> Any:
        return self.parts[i]


class Tiled:
    """A tensor behind a descriptor."""

    class block_type:  # noqa: N801 (the name in Gluon)
        nbytes = 1

    dtype = UNKNOWN

    def __init__(self, name: str) -> None:
        self.name = name


class Sizes(NamedTuple):
    """Sizes of a call as the kernel gets them, and queries per head of keys."""

    heads: int
    all_heads: int
    m: int
    n: int
    left: int | None
    right: int | None
    group: int


class Product(NamedTuple):
    """A product of 64 queries and a tile of keys."""

    batch: int
    head: int
    first_query: int
    key_head: int
    first_key: int
    masked: bool


class Program:
    """One program of the kernel: a producer and two consumers, whose order is drawn wherever it is free."""

    def __init__(self, number: int, code: Any, order: random.Random) -> None:
        self.number, self.code, self.order = number, code, order
        self.products: list[list[Product]] = [[], []]  # of each consumer
        self.values: list[list[tuple[int, ...]]] = [[], []]  # batch, head and first value of each tile of values
        self.stored: list[tuple[int, ...]] = []  # batch, head and first query of each output

    def run(self, table: torch.Tensor, spans: torch.Tensor | None, sizes: Sizes) -> None:
        """Run the program to its end; AssertionError if it has none, or if memory is overwritten too early."""
        slots, q_slots, consumers = hopper.SLOTS.value, hopper.Q_SLOTS.value, hopper.CONSUMERS.value
        buffers = tuple(Buffer([Slot() for _ in range(n)]) for n in (q_slots * consumers, slots, slots))
        barriers = tuple(
            Buffer([Barrier(count) for _ in range(n)])
            for n, count in ((slots, 1), (slots, consumers), (q_slots * consumers, 1), (q_slots * consumers, 1))
        )
        plan = Pointer(table.flatten().tolist()), table.shape[1], sizes.heads, sizes.all_heads
        packing: tuple[Any, ...] = None, 0, None, 0
        if spans is not None:
            packing = UNKNOWN, 0, Pointer(spans.flatten().tolist()), spans.stride(0) if len(spans) > 1 else 0
        band = sizes.m, sizes.n, sizes.left, sizes.right
        inputs = Tiled("query"), Tiled("key"), Tiled("value")
        roles = [
            self._function("_consume", i)(Tiled("output"), UNKNOWN, buffers, Buffer([Slot(), Slot()]), barriers, plan,
                                          *band[:2], 1.0, *band[2:], packing, i, True, True)
            for i in range(consumers)
        ]  # fmt: skip
        roles.append(self._function("_produce", 0)(inputs, buffers, barriers, plan, *band, packing, sizes.group))
        self._advance(roles)
        for barrier in (barrier for buffer in barriers for barrier in buffer.parts):
            assert barrier.missing == barrier.count, "an arrival without the others of its phase"

    def _advance(self, roles: list[Generator[Any, None, None]]) -> None:
        waits = {role: next(role) for role in roles}
        while waits:
            ready = [role for role, (barrier, parity) in waits.items() if barrier.has_ended(parity)]
            assert ready, f"{len(waits)} of {len(roles)} wait forever"
            role = self.order.choice(ready)
            try:
                waits[role] = next(role)
            except StopIteration:
                del waits[role]

    def _function(self, name: str, consumer: int) -> Any:
        """A function of the kernel, for one consumer or the producer."""
        parts = Gluon(self, consumer)
        names = {name: v.value if isinstance(v, gl.constexpr) else v for name, v in vars(hopper).items()}
        names |= dict.fromkeys(("gl", "mbarrier", "tma"), parts) | dict.fromkeys(TENSOR_FUNCTIONS, UNKNOWN)
        names |= {name: getattr(parts, name) for name in ("_masked", "warpgroup_mma", "warpgroup_mma_wait")}
        exec(self.code, names)
        return names[name]


class Gluon:
    """What Gluon does, for one role: scalars are integers, tensors are unknown."""

    static_range = staticmethod(range)

    def __init__(self, program: Program, consumer: int) -> None:
        self.program, self.consumer = program, consumer
        self.reading: list[tuple[Slot, Any]] = []  # slots that a product reads, with their contents when it began
        self.is_masked = False

    def __getattr__(self, name: str) -> Any:  # layouts, and functions of tensors
        return UNKNOWN

    def program_id(self, _: int) -> int:
        return self.program.number

    def load(self, place: Any, *_: Any) -> Any:
        return place.numbers[place.place] if isinstance(place, Pointer) else UNKNOWN

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def maximum(self, a: Any, b: Any) -> Any:
        return UNKNOWN if Unknown in (type(a), type(b)) else max(a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return UNKNOWN if Unknown in (type(a), type(b)) else min(a, b)

    def expect(self, barrier: Barrier, _: int) -> None:
        self.expected = barrier  # its phase ends with the last of the copies

    def async_copy_global_to_shared(self, source: Tiled, place: list[int], barrier: Barrier, slot: Slot) -> None:
        assert barrier is self.expected
        slot.content = tuple(place[:3])
        if source.name != "key":  # values follow
            barrier.arrive()

    def async_copy_shared_to_global(self, _output: Tiled, place: list[int], _slot: Slot) -> None:
        self.program.stored.append(tuple(place[:3]))

    def arrive(self, barrier: Barrier, count: int) -> None:
        assert not self.reading, "released while a product reads"
        for _ in range(count):
            barrier.arrive()

    def warpgroup_mma(self, a: Any, b: Slot, *_: Any, **options: Any) -> Any:
        read = [slot for slot in (a, b) if isinstance(slot, Slot)]
        if len(read) == 2:
            self.met = *a.content, *b.content[1:]
        else:
            self.program.values[self.consumer].append(b.content)
        if options.get("is_async"):
            self.reading += [(slot, slot.content) for slot in read]
        return UNKNOWN

    def _masked(self, *_: Any) -> Any:
        self.is_masked = True
        return UNKNOWN

    def warpgroup_mma_wait(self, in_flight: int, deps: list[Any]) -> Any:
        if in_flight == 0:
            assert all(slot.content == content for slot, content in self.reading), "overwritten while a product reads"
            self.program.products[self.consumer].append(Product(*self.met, self.is_masked))
            self.reading, self.is_masked = [], False
        return deps if len(deps) > 1 else deps[0]


class _Simulated(ast.NodeTransformer):
    """The source of a kernel as that of generators."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name == "mbarrier.wait":
            return ast.Yield(ast.Tuple(node.args, ast.Load()))
        if name in ("_load", "_step"):  # which wait
            return ast.YieldFrom(node)
        if name.endswith(".to") and ast.unparse(node.args[0]) == "gl.int64":  # of an integer
            return node.func.value  # type: ignore[attr-defined]
        return node


SOURCE = Path(inspect.getfile(hopper)).read_text()


def code(source: str = SOURCE) -> Any:
    """The functions of the kernel that wait or place tiles, compiled as generators."""
    tree = ast.parse(source)
    tree.body = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in SIMULATED]
    assert len(tree.body) == len(SIMULATED)
    return compile(ast.fix_missing_locations(_Simulated().visit(tree)), "hopper.py", "exec")
