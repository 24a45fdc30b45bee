"""Passes of a compiled model, inside which calls cannot be intercepted.

    eager pass    before the compiled one, on the same inputs, without gradients, up to the last attention layer
    operators     calls that stay in the graph: gradlogz::attention of a model that runs on `attend`, whose results are
                  read; the fused operators of torch, with whose queries and keys the statistics are computed

Operators are read while the graph runs; the eager pass, then made once, supplies the names of the layers in the order
of the calls. An operator call is that of the next layer with its numbers of heads and head sizes. The first compiled
pass must agree with the eager one in sizes and statistics; otherwise (an order that differs, layers that compute
attention by other operations, CUDA graphs) eager passes are made before every recorded pass.

Read next: monitoring.py, which records both kinds of passes; fused_operators.py and
../../kernels/attention/operator.py (the operators).
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._typing import Tensor
from ...kernels.attention.operator import operator_read_by
from ...kernels.attention.reference import Statistics
from ...kernels.attention.scoring import Scoring, Sight
from ..functional import with_sinks
from ..result import Attention
from .collections_of_results import not_collected
from .fused_operators import FusedCall, FusedOperators
from .head_summaries import AttentionCall, LayerSums, SharedSights, sums_of
from .hooks import Hook, in_backward
from .intercepted_calls import Call, call_from_operator, call_from_sdpa

# Torch's module of CUDA graphs: a pass may run in their memory, in which nothing may be kept.
CUDA_GRAPHS = "torch._inductor.cudagraph_trees"

# A layer whose statistics are this much nearer to those of another one has been mistaken for it.
NEARER = 0.1


Sizes = tuple[torch.Size, torch.Size, torch.Size]  # of query, key and value


class EagerCall(NamedTuple):
    """An attention call of the eager pass."""

    name: str
    crosses: bool
    by_attend: bool
    sizes: Sizes | None  # None if the call cannot be read from an operator
    sinks: Tensor | None
    sums: LayerSums
    device: torch.device
    sight: int  # calls with equal numbers have the same masks


class _LastLayerReached(BaseException):
    """Raised after the last attention layer, to end an eager pass early."""


class CompiledPasses:
    """Context in which passes of a compiled model are recorded.

    Args:
        model: the model that is called; `inner` is the module inside its wrappers.
        interception: context in which `add_call` gets every attention call of the eager pass.
        record: function that gets the name and the sums of each layer of a compiled pass.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        interception: AbstractContextManager[Any],
        record: Callable[[str, LayerSums], None],
    ) -> None:
        self._calls: list[EagerCall] = []
        self._sights: dict[Any, int] = {}  # masks of the eager pass, and their first call
        self._last: tuple[str, int] | None = None  # name and number of the last call
        self._model, self._inner, self._interception, self._record = model, inner, interception, record
        self._by_operator: bool | None = None  # None until a compiled pass has been compared with an eager one
        self._reading: _Reading | None = None

    def __enter__(self) -> "CompiledPasses":
        self._compiled: Any = self._model.__dict__.get("_compiled_call_impl")
        if self._compiled is None:
            self._hooks = [
                self._model.register_forward_pre_hook(Hook(self._begin), prepend=True, with_kwargs=True),
                self._model.register_forward_hook(Hook(self._end), prepend=True, always_call=True),
            ]
        else:  # hooks would be compiled too
            self._model._compiled_call_impl = self._run
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        if self._compiled is None:
            for hook in self._hooks:
                hook.remove()
        else:
            self._model._compiled_call_impl = self._compiled

    def add_call(self, name: str, call: AttentionCall, *, crosses: bool, by_attend: bool, sums: LayerSums) -> None:
        """Add a call of the eager pass, and end the pass if it is the last one."""
        sizes, sinks = None, None
        if isinstance(call, Call) and call.query.ndim == 4 and call.requested == ("scalar" if by_attend else "none"):
            sinks = call.options.get("sinks")
            if sinks is None or (by_attend and isinstance(sinks, nn.Parameter)):  # the operator does not get them
                sizes = call.query.shape, call.key.shape, call.value.shape
        sight = call.sight()
        number = len(self._calls) if sight is None else self._sights.setdefault(sight, len(self._calls))
        self._calls.append(EagerCall(name, crosses, by_attend, sizes, sinks, sums, sums.rows.sums.device, number))
        if (name, len(self._calls)) == self._last:
            raise _LastLayerReached

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._begin(self._model, args, kwargs)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._end()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end()  # of a pass that was interrupted
        if not torch.is_grad_enabled():
            return
        if not self._by_operator:
            self._calls, self._sights = [], {}
            self._run_eager(args, kwargs)
        if self._by_operator is not False and self._calls and all(call.sizes is not None for call in self._calls):
            self._reading = _Reading(self._calls)

    def _end(self, *_: Any) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        reading.close()
        if not self._by_operator:  # the eager pass has been recorded
            self._by_operator = reading.is_complete() and reading.agrees()
        elif reading.is_complete():
            for call in self._calls:
                self._record(call.name, reading.sums[call.name])
        else:
            self._by_operator = None  # other layers than before: this pass is lost, the next one is compared anew

    def _run_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        buffers = [(m, name, b, b._version, b.clone()) for m in self._inner.modules() for name, b in _buffers(m)]
        devices = {p.device for p in self._inner.parameters() if p.device.type == "cuda"}
        eager = torch.compiler.set_stance("force_eager")
        with (
            torch.random.fork_rng(devices), torch.no_grad(), eager, not_collected(), self._interception,
            suppress(_LastLayerReached),
        ):  # fmt: skip
            self._inner(*args, **kwargs)
            self._last = (self._calls[-1].name, len(self._calls)) if self._calls else None
        self._sights = {}  # keeps no mask
        for module, name, b, version, before in buffers:
            module._buffers[name] = b
            if b._version != version:  # autograd forbids writing to a tensor that a graph has saved
                b.copy_(before)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module._buffers.items() if b is not None]


class _Reading:
    """Calls of operators in one pass, each assigned to the next layer with its numbers of heads and head sizes."""

    def __init__(self, calls: list[EagerCall]) -> None:
        self.sums: dict[str, LayerSums] = {}
        self._sizes: dict[str, Sizes] = {}
        self._sights = SharedSights()
        self._calls, self._failed = calls, False
        self._waiting: dict[tuple[int, ...], list[EagerCall]] = defaultdict(list)
        for call in calls:
            self._waiting[_kind(call.by_attend, call.sizes)].append(call)
        self._kept = {call.name: call.sums.empty(call.device) for call in calls} if CUDA_GRAPHS in sys.modules else {}
        self._context = ExitStack()
        self._context.enter_context(operator_read_by(self._read_attend))
        if not all(call.by_attend for call in calls):
            self._context.enter_context(FusedOperators(self._read_fused))

    def close(self) -> None:
        self._context.close()

    def _read_attend(
        self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, scoring: Scoring, rows: Statistics | None
    ) -> None:
        if rows is None:
            self._failed = True
        elif (eager := self._next(True, (query, key, value))) is not None:
            call = call_from_operator(query, key, value, sight, scoring, eager.sinks)
            self._add(eager, call, _result(rows, eager.sinks))

    def _read_fused(self, fused: FusedCall) -> None:
        query, key, value, mask, is_causal, scale = fused
        eager = self._next(False, (query, key, value))
        if eager is None:
            return
        assert eager.sizes is not None
        repeated = max(1, key.shape[1] // eager.sizes[1][1])  # heads of keys, for operators that do not group heads
        key, value = key[:, ::repeated], value[:, ::repeated]
        grouped = query.shape[1] != key.shape[1]
        call = call_from_sdpa(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        with torch.autocast(query.device.type, enabled=False):  # the operands have been converted
            self._add(eager, call, None)

    def _next(self, by_attend: bool, operands: tuple[Tensor, ...]) -> EagerCall | None:
        """Return the layer of an operator call; None for one that is not recorded."""
        if in_backward():  # a checkpoint is recomputed
            return None
        query, key, value = operands
        waiting = self._waiting[_kind(by_attend, (query.shape, key.shape, value.shape))]
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()  # a CUDA graph would contain the sums
        if not waiting or captured or (CUDA_GRAPHS in sys.modules and not self._kept):
            self._failed = True
            return None
        return waiting.pop(0)

    def _add(self, eager: EagerCall, call: Call, result: Attention | None) -> None:
        with torch.no_grad():
            # A graph may write another mask to the memory of one: layers share what they share in the eager pass.
            shared = partial(self._sights.keys_visible_to, group=eager.sight)
            sums = sums_of(call, crosses=eager.crosses, result=result, keys_visible_to=shared)
            self.sums[eager.name] = self._kept[eager.name].filled(sums) if self._kept else sums
        self._sizes[eager.name] = call.query.shape, call.key.shape, call.value.shape

    def is_complete(self) -> bool:
        """Return whether every layer has been read."""
        return not self._failed and not any(self._waiting.values())

    def agrees(self) -> bool:
        """Return whether the layers have the sizes of the eager pass, and none the statistics of another one.

        Statistics of the same layer differ by rounding and by dropout.
        """
        kinds: dict[tuple[int, ...], list[EagerCall]] = defaultdict(list)
        for call in self._calls:
            kinds[_kind(call.by_attend, call.sizes)].append(call)
        if any(self._sizes[call.name] != call.sizes for call in self._calls):
            return False
        for calls in kinds.values():
            read = torch.stack([_means(self.sums[call.name]) for call in calls])
            distances = torch.cdist(read, torch.stack([_means(call.sums) for call in calls])).cpu()
            if bool((distances.amin(-1) < NEARER * distances.diagonal()).any()):
                return False
        return True


def _kind(by_attend: bool, sizes: Sizes | None) -> tuple[int, ...]:
    """Numbers of heads and sizes of a head, of queries and of values; fused operators may repeat heads of keys."""
    query, key, value = sizes  # type: ignore[misc]
    return by_attend, query[1], key[1] if by_attend else 0, query[3], value[3]


def _means(sums: LayerSums) -> Tensor:
    """Means over the rows of entropy and log normaliser, for each head."""
    return (sums.rows.total[:2] / sums.rows.count).flatten()


def _result(rows: Statistics, sinks: Tensor | None) -> Attention:
    """Statistics of a call of the operator, with the sinks that `attend` adds to them."""
    _, G, entropy, variance, highest = rows
    if sinks is None:
        return Attention(G, G, entropy, None, variance, highest)
    mean = (G - entropy).masked_fill(G == -torch.inf, 0.0)
    return with_sinks(Attention(G.unsqueeze(-1), G, entropy, mean, variance, highest), sinks, G.shape[:1])
