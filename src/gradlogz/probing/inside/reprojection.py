"""Re-projection: a layer run again on other tokens, up to its call of attention, to obtain their queries and keys.

    call_on(layer_call, x)                             arguments of attention if the layer reads x
    queries_of(at_tokens(layer_call, index), x)        queries of a subset of each sequence's tokens

The layer runs with its recorded arguments, masks and positions included, until it calls attention; the rest is not
computed. Gradients flow from the queries to x.

Read next: weights.py (runs layers on unit vectors), ../predictions/ascent.py (runs them on displaced tokens).
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..._typing import Float, Int, Tensor
from ...attention.in_models.intercepted_calls import Call
from ...attention.in_models.interception import LAYERS, SOURCES, InterceptedCall, Interception, Receiver
from ...attention.result import Attention
from .events import LayerCall

CACHES = ("past_key_values", "past_key_value", "layer_past")  # arguments; a cache would return recorded keys
ROUNDING, UNITS = 1e-3, 4.0  # relative tolerance; its minimum in units of eps, which matters in bfloat16


def layer_call_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> LayerCall | None:
    """Return the record of a layer call; None if the layer's input tokens are not among its arguments."""
    top = [(None, t) for t in args] + list(kwargs.items())
    inputs = [(name, t) for name, t in top if isinstance(t, Tensor) and t.ndim == 3 and t.is_floating_point()]
    inputs = [(name, t) for name, t in inputs if t.shape[0] == rows]
    if not inputs:
        return None
    tokens = inputs[0][1]
    others = [t for name, t in inputs if t is not tokens and (name in SOURCES or name is None)]
    return LayerCall(module, args, kwargs, tokens, others[0] if others else None)


def call_on(
    layer_call: LayerCall, tokens: Tensor, source: Tensor | None = None, *, layers: str = LAYERS
) -> Call | None:
    """Return the layer's call of attention for other tokens of the same shape; None if it computes its own logits."""
    new: dict[int, Any] = {id(layer_call.tokens): tokens}
    if layer_call.source is not None:
        new[id(layer_call.source)] = layer_call.source if source is None else source
    receiver = _FirstCall()
    with suppress(_Stop), Interception(layer_call.module, receiver, layers=layers):
        layer_call.module(
            *(new.get(id(a), a) for a in layer_call.args),
            **{name: None if name in CACHES else new.get(id(v), v) for name, v in layer_call.kwargs.items()},
        )
    return receiver.call


def at_tokens(layer_call: LayerCall, index: Int[Tensor, "b r"]) -> LayerCall:
    """Restrict a layer call to a subset of each sequence's tokens.

    If the layer is parted, its arguments are indexed along every dimension recognised as one of tokens (`reproduces`
    tests whether that suffices). Otherwise only the positions are recorded.
    """
    if not layer_call.parted:
        return layer_call._replace(places=index)
    b, n = layer_call.tokens.shape[:2]
    new: dict[int, Tensor] = {}

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return new.setdefault(id(value), _cut(value, index, b, n))
        if isinstance(value, (tuple, list)):
            return type(value)(cut(each) for each in value)
        return value

    args, kwargs = tuple(cut(a) for a in layer_call.args), {name: cut(v) for name, v in layer_call.kwargs.items()}
    source = None if layer_call.source is None else new[id(layer_call.source)]
    return layer_call._replace(args=args, kwargs=kwargs, tokens=new[id(layer_call.tokens)], source=source)


def queries_of(
    layer_call: LayerCall, streams: Float[Tensor, "k b r d"], *, layers: str = LAYERS
) -> Float[Tensor, "b h kr e"] | None:
    """Return the concatenated queries of k versions of the tokens, after the norm that precedes the layer."""
    k, b, r, _ = streams.shape
    z = streams if layer_call.norm is None else layer_call.norm(streams)
    if layer_call.places is None:
        versions = at_tokens(layer_call, _again(b, r, k, z.device))
        calls = [call_on(versions, z.transpose(0, 1).flatten(1, 2).contiguous(), layers=layers)]
    else:  # other tokens are set to 0: the query of a token does not depend on them
        at = layer_call.places.unsqueeze(-1).expand_as(z[0])
        calls = [
            call_on(layer_call, z.new_zeros(layer_call.tokens.shape).scatter(1, at, each), layers=layers) for each in z
        ]
    queries = [_rows(call.query, layer_call.places) for call in calls if call is not None]
    return torch.cat(queries, 2) if len(queries) == len(calls) else None


def reproduces(
    layer_call: LayerCall, query: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"], *, layers: str = LAYERS
) -> bool:
    """Return whether the layer, run on a subset of its tokens, reproduces their queries."""
    part = at_tokens(layer_call._replace(parted=True), index)
    try:
        call = call_on(part, part.tokens, layers=layers)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the layer needs arguments of other shapes
        return False
    expected = _rows(query, index)
    if call is None or call.query.shape != expected.shape:
        return False
    rounding = max(ROUNDING, UNITS * torch.finfo(query.dtype).eps)
    return bool((call.query - expected).abs().max() <= rounding * expected.abs().max())


def _cut(value: Tensor, index: Tensor, b: int, n: int) -> Tensor:
    """Index an argument [b, n, ...], [1, n, ...] or (rotations) [b, 1, n, ...] by tokens; return others unchanged."""
    if value.ndim >= 2 and value.shape[0] in (1, b) and value.shape[1] == n:
        dim = 1
    elif value.ndim >= 4 and value.shape[0] in (1, b) and value.shape[2] == n != value.shape[3]:  # masks are not read
        dim = 2
    else:
        return value
    at = index.reshape(b, *(1,) * (dim - 1), -1, *(1,) * (value.ndim - dim - 1))
    full = value.expand(b, *value.shape[1:])
    return full.gather(dim, at.expand(*full.shape[:dim], -1, *full.shape[dim + 1 :]))


def _again(b: int, r: int, k: int, device: torch.device) -> Int[Tensor, "b kr"]:
    """Return the positions of r tokens, repeated k times."""
    return torch.arange(r, device=device).repeat(k).expand(b, -1)


def _rows(query: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"] | None) -> Float[Tensor, "b h r d"]:
    b, h, _, d = query.shape
    return query if index is None else query.gather(2, index[:, None, :, None].expand(b, h, -1, d))


class _Stop(Exception):  # noqa: N818 - control flow: the call of attention has been recorded
    pass


class _FirstCall(Receiver):
    """Receiver of the first call of attention that a layer makes; it then stops the layer."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def begin(self) -> bool:
        """Intercept every pass."""
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention | None:
        """Record the call and stop the layer."""
        self.call = met.call if isinstance(met.call, Call) else None
        raise _Stop

    def finish(self, missed: tuple[str, ...]) -> None:
        """Do nothing if the layer made no call."""
