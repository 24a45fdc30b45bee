"""Sums of the statistics of every head over the rows of attention: they become the rows of the monitor.

Counts, sums, minima and maxima merge exactly over passes, accumulated gradients and processes. They stay on the device
of the model, without waiting for it, until a row is made.

Read next: monitor_rows.py (the statistics), monitoring.py (which collects them).
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from ..._typing import Bool, Float, Tensor
from ..result import Attention, by_heads
from .first_keys import SinkWeights
from .hidden_keys import KeyVisibility
from .monitor_rows import Extremes, Heads

# Masks of a pass that are remembered: those of full and sliding layers in turn, and of a decoder's cross-attention.
KEPT_SIGHTS = 4

# Sums and ends of the rows, and of the keys, as HeadSums has them.
Tables = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@runtime_checkable
class AttentionCall(Protocol):
    """The methods of the calls of intercepted_calls.py that are used here."""

    def statistics(self) -> Attention: ...
    def sight(self) -> tuple[Any, ...] | None: ...
    def visible_keys(self) -> KeyVisibility: ...
    def sink_weights(self, log_normalizer: Tensor, keys: KeyVisibility) -> SinkWeights: ...
    def norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None: ...
    def every_row_sees_a_key(self) -> bool: ...
    def tables_by_a_kernel(self, result: Attention) -> Tables | None: ...


class HeadSums:
    """Running sums of statistics over the rows of each head.

    sums    count, sums, sums of squares        added up by `add`, and over processes
    ends    least, and negated greatest         of which `add` takes the minimum
    """

    def __init__(self, sums: Float[Tensor, "added h"], ends: Float[Tensor, "extreme h"]) -> None:
        self.sums, self.ends = sums, ends

    @classmethod
    def of(cls, values: Float[Tensor, "s b h m"], selected: Bool[Tensor, "b #h m"] | None) -> "HeadSums":
        """Sum the statistics of every row over the rows selected; None: all."""
        rows, (s, b, h, m) = (1, 3), values.shape
        if b * m == 0:  # minima of an empty batch do not exist: one row that is not selected stands for it
            values, selected = values.new_zeros(s, 1, h, 1), values.new_zeros(1, 1, 1, dtype=torch.bool)
        if selected is None:
            count = torch.full_like(values[0, 0, :, 0], values[0, :, 0].numel(), dtype=torch.float64)
            least, greatest = values.amin(rows), values.amax(rows)
        else:
            selected = selected.expand(values.shape[1:])
            count = selected.sum((0, 2), dtype=torch.float64)
            left_out = ~selected
            least = values.masked_fill(left_out, torch.inf).amin(rows)
            greatest = values.masked_fill(left_out, -torch.inf).amax(rows)
            values = values.masked_fill(left_out, 0.0)
        total = values.sum(rows, dtype=torch.float64)
        square = torch.linalg.vector_norm(values, dim=rows, dtype=torch.float64).square()
        return cls(torch.cat((count.unsqueeze(0), total, square)), torch.cat((least, -greatest)).double())

    def add(self, other: "HeadSums") -> None:
        """Add the sums of another pass."""
        self.sums, self.ends = self.sums + other.sums, torch.minimum(self.ends, other.ends)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of statistics and of heads."""
        return len(self.ends) // 2, self.ends.shape[1]

    @property
    def count(self) -> Float[Tensor, "h"]:
        """Number of rows."""
        return self.sums[0]

    @property
    def total(self) -> Float[Tensor, "s h"]:
        """Sums of the statistics."""
        return self.sums[1:].chunk(2)[0]


class LayerSums(NamedTuple):
    """Sums over the queries of a layer, and over its keys, by key head; None where the keys are unknown."""

    rows: HeadSums
    keys: HeadSums | None

    def parts(self) -> list[HeadSums]:
        """Sums of the rows, and of the keys where they are known."""
        return [self.rows] if self.keys is None else [self.rows, self.keys]

    def empty(self, device: torch.device) -> "LayerSums":
        """Uninitialised sums of the same sizes on a device."""
        parts = (HeadSums(torch.empty_like(p.sums, device=device), torch.empty_like(p.ends, device=device))
                 for p in self.parts())  # fmt: skip
        return LayerSums(next(parts), next(parts, None))

    def filled(self, other: "LayerSums") -> "LayerSums":
        """Copy the numbers of other sums into these, and return these."""
        for one, another in zip(self.parts(), other.parts(), strict=True):
            one.sums.copy_(another.sums)
            one.ends.copy_(another.ends)
        return self

    def add(self, other: "LayerSums") -> None:
        """Add the sums of another pass."""
        for one, another in zip(self.parts(), other.parts(), strict=True):
            one.add(another)


class SharedSights:
    """The keys that rows see, computed once for calls of a pass with the same masks, segments and band.

    Only the last KEPT_SIGHTS are kept: a layer with its own mask must not keep it until the pass ends.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, KeyVisibility] = {}

    def keys_visible_to(self, call: AttentionCall, *, group: int = 0) -> KeyVisibility:
        """Return the keys that the rows of a call see; calls of different groups share nothing."""
        sight = call.sight()
        if sight is None:
            return call.visible_keys()
        keys = self._keys.pop((group, sight), None)
        self._keys[group, sight] = keys = call.visible_keys() if keys is None else keys
        if len(self._keys) > KEPT_SIGHTS:
            del self._keys[next(iter(self._keys))]
        return keys


def sums_of(
    call: AttentionCall,
    *,
    crosses: bool = False,
    result: Attention | None = None,
    keys_visible_to: Callable[[AttentionCall], KeyVisibility] | None = None,
) -> LayerSums:
    """Statistics of every head in one call, from its result if that shows them, else from its queries and keys.

    With `crosses` the keys are other tokens than the queries, so that the mask does not identify padded queries. No
    loss depends on the rows of padding. `keys_visible_to` is that of the SharedSights of the pass.
    """
    if result is None:
        result = call.statistics()
    tables = call.tables_by_a_kernel(result)
    if tables is not None:
        return LayerSums(*(HeadSums(*each) for each in tables))
    keys = call.visible_keys() if keys_visible_to is None else keys_visible_to(call)
    visible = keys.visible
    G = by_heads(result.log_normalizer)
    statistics = result.entropy, result.log_normalizer, result.logit_variance, result.max_logit
    norms = call.norms(G.dtype)
    fields = (*statistics, *call.sink_weights(result.log_normalizer, keys), *([] if norms is None else norms[:1]))
    values = torch.stack([by_heads(t).to(G.dtype).expand_as(G) for t in fields if t is not None])
    selected = None
    if keys.padded is not None and not crosses and G.shape[-1] == keys.padded.shape[-1]:
        selected = (G != -torch.inf) & ~keys.padded.unsqueeze(1)
    elif not call.every_row_sees_a_key():
        selected = G != -torch.inf
    if norms is None:
        return LayerSums(HeadSums.of(values, selected), None)
    tokens = torch.stack(torch.broadcast_tensors(*map(by_heads, norms[1:])))
    if visible is None or keys.by_some_row is None:
        return LayerSums(HeadSums.of(values, selected), HeadSums.of(tokens, None))
    tokens = tokens.expand(-1, len(visible), -1, -1)
    return LayerSums(HeadSums.of(values, selected), HeadSums.of(tokens, keys.by_some_row.unsqueeze(1)))


class Transfer:
    """Sums of all layers on their way to the CPU, in one copy; a GPU makes it while the training goes on."""

    def __init__(self, layers: dict[str, LayerSums]) -> None:
        self._layers = layers
        self._parts = [part for layer in layers.values() for part in layer.parts()]
        tables = [table for part in self._parts for table in (part.sums, part.ends)]
        self._sizes = [table.numel() for table in tables]
        numbers = torch.cat([table.flatten() for table in tables]) if tables else torch.empty(0)
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers.cpu()

    def heads(self, kinds: dict[str, str]) -> dict[str, Heads]:
        """Means and extremes of every layer; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        tables = iter(self._numbers.split(self._sizes))
        for part in self._parts:
            h = part.shape[1]
            part.sums, part.ends = (next(tables).reshape(-1, h) for _ in range(2))
        summaries = iter(_summaries(self._parts))
        result = {}
        for name, layer in self._layers.items():
            rows, keys = next(summaries), None if layer.keys is None else next(summaries)
            result[name] = _heads(rows, keys, kinds.get(name.partition("#")[0], "full"))
        return result


class _Summary(NamedTuple):
    """Every statistic of one layer, the number of rows of a head, and of heads in which one of the first is unknown."""

    extremes: list[Extremes]
    rows: int
    unknown: int


def _summaries(parts: list[HeadSums]) -> list[_Summary]:
    """Means, extremes and deviations of all layers, those of equal sizes together; NaN for a head without rows."""
    by_place: dict[int, _Summary] = {}
    shapes = [part.shape for part in parts]
    for shape in dict.fromkeys(shapes):
        places = [i for i, each in enumerate(shapes) if each == shape]
        sums, ends = torch.stack([parts[i].sums for i in places]), torch.stack([parts[i].ends for i in places])
        count, (total, square), (least, negated) = sums[:, :1], sums[:, 1:].chunk(2, 1), ends.chunk(2, 1)
        mean = total / count.clamp(min=1.0)
        deviation = (square / count.clamp(min=1.0) - mean.square()).clamp(min=0.0).sqrt()
        table = torch.stack((mean, least, -negated, deviation), 2)  # [layers, statistics, 4, heads]
        each = iter(table.masked_fill((count == 0).unsqueeze(2), torch.nan).flatten(0, 2).unbind())
        rows = count.amax((1, 2)).long().tolist()
        unknown = ((count[:, 0] > 0) & total[:, :4].isnan().any(1)).sum(-1).tolist()
        for i, n, k in zip(places, rows, unknown, strict=True):
            by_place[i] = _Summary([Extremes(*islice(each, 4)) for _ in range(shape[0])], n, k)
    return [by_place[i] for i in range(len(parts))]


def _heads(rows: _Summary, keys: _Summary | None, kind: str) -> Heads:
    entropy, G, variance, highest, sink, uniform, learned, *query = rows.extremes
    key, value = (None, None) if keys is None else keys.extremes
    return Heads(
        entropy, G, variance, highest, sink, learned, query[0] if query else None, key, value,
        uniform_sink=uniform.mean, rows=rows.rows, nan_heads=rows.unknown, kind=kind,
    )  # fmt: skip


def merged(layers: dict[str, LayerSums], group: Any, device: torch.device) -> dict[str, LayerSums]:
    """Sums over all processes of a group; each process must call this in the same step.

    A layer that ran only in some processes, as with layer dropout, has the sums of those.
    """
    shapes: list[dict[str, list[tuple[int, int]]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(shapes, {name: [p.shape for p in s.parts()] for name, s in layers.items()}, group=group)
    all_shapes = {name: shape for each in shapes for name, shape in each.items()}
    if not all_shapes:
        return layers
    merged = {name: layers[name] if name in layers else _no_rows(each, device) for name, each in all_shapes.items()}
    parts = [part for layer in merged.values() for part in layer.parts()]
    sums, ends = torch.cat([p.sums.flatten() for p in parts]), torch.cat([p.ends.flatten() for p in parts])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
    totals, minima = sums.split([p.sums.numel() for p in parts]), ends.split([p.ends.numel() for p in parts])
    for part, total, minimum in zip(parts, totals, minima, strict=True):
        part.sums, part.ends = total.reshape(part.sums.shape), minimum.reshape(part.ends.shape)
    return merged


def _no_rows(shapes: list[tuple[int, int]], device: torch.device) -> LayerSums:
    sums = [
        HeadSums.of(torch.zeros(s, 1, h, 1, device=device), torch.zeros(1, h, 1, dtype=torch.bool, device=device))
        for s, h in shapes
    ]
    return LayerSums(sums[0], sums[1] if len(sums) > 1 else None)
