"""A layer, run again on other tokens up to its call of attention: what queries and keys it makes of them.

    call_on(layer_call, x)                             the call that the layer hands to attention if it reads x
    queries_of(at_tokens(layer_call, index), x)        the queries of some tokens of each sequence alone

The layer is run with the arguments that it was given, masks and positions included, until it calls attention; the rest
is not computed. Gradients flow from the queries to x.

Read next: weights.py (run on unit vectors), ../predictions/ascent.py (run on moved tokens).
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

ROUNDING, UNITS = 1e-3, 4.0  # of float16 and better; in units of rounding where these are larger, as those of bfloat16


def layer_call_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> LayerCall | None:
    """A layer with its arguments; None if what it reads is not among them."""
    top = [(None, t) for t in args] + list(kwargs.items())
    tokens = [(name, t) for name, t in top if isinstance(t, Tensor) and t.ndim == 3 and t.is_floating_point()]
    tokens = [(name, t) for name, t in tokens if t.shape[0] == rows]
    if not tokens:
        return None
    given = tokens[0][1]
    others = [t for name, t in tokens if t is not given and (name in SOURCES or name is None)]
    return LayerCall(module, args, kwargs, given, others[0] if others else None)


def call_on(layer_call: LayerCall, given: Tensor, source: Tensor | None = None, *, layers: str = LAYERS) -> Call | None:
    """The call of the layer for other tokens of the same number; None if it computes its own logits."""
    new: dict[int, Any] = {id(layer_call.given): given}
    if layer_call.source is not None:
        new[id(layer_call.source)] = layer_call.source if source is None else source
    answer = _Answer()
    with suppress(_Answered), Interception(layer_call.module, answer, layers=layers):
        layer_call.module(
            *(new.get(id(a), a) for a in layer_call.args),
            **{name: new.get(id(v), v) for name, v in layer_call.kwargs.items()},
        )
    return answer.call


def at_tokens(layer_call: LayerCall, index: Int[Tensor, "b r"]) -> LayerCall:
    """The layer with some tokens of each sequence: with what its arguments say of these, if it is parted.

    Arguments are cut where a dimension of tokens is recognised; `reproduces` says whether that is enough.
    """
    if not layer_call.parted:
        return layer_call._replace(places=index)
    b, n = layer_call.given.shape[:2]
    new: dict[int, Tensor] = {}

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return new.setdefault(id(value), _cut(value, index, b, n))
        if isinstance(value, (tuple, list)):
            return type(value)(cut(each) for each in value)
        return value

    args, kwargs = tuple(cut(a) for a in layer_call.args), {name: cut(v) for name, v in layer_call.kwargs.items()}
    source = None if layer_call.source is None else new[id(layer_call.source)]
    return layer_call._replace(args=args, kwargs=kwargs, given=new[id(layer_call.given)], source=source)


def queries_of(
    layer_call: LayerCall, streams: Float[Tensor, "k b r d"], *, layers: str = LAYERS
) -> Float[Tensor, "b h kr e"] | None:
    """The queries of k versions of the tokens, side by side, read through the norm before the layer."""
    k, b, r, _ = streams.shape
    z = streams if layer_call.norm is None else layer_call.norm(streams)
    if layer_call.places is None:
        versions = at_tokens(layer_call, _again(b, r, k, z.device))
        calls = [call_on(versions, z.transpose(0, 1).flatten(1, 2), layers=layers)]
    else:  # the others are 0: what is made of one token does not depend on them
        at = layer_call.places.unsqueeze(-1).expand_as(z[0])
        calls = [
            call_on(layer_call, z.new_zeros(layer_call.given.shape).scatter(1, at, each), layers=layers) for each in z
        ]
    found = [_rows(call.query, layer_call.places) for call in calls if call is not None]
    return torch.cat(found, 2) if len(found) == len(calls) else None


def reproduces(
    layer_call: LayerCall, query: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"], *, layers: str = LAYERS
) -> bool:
    """Whether the layer, run on some tokens alone, makes the queries of them that it made among all."""
    part = at_tokens(layer_call._replace(parted=True), index)
    try:
        call = call_on(part, part.given, layers=layers)
    except (RuntimeError, ValueError, TypeError, IndexError):  # it wants arguments of other shapes
        return False
    expected = _rows(query, index)
    if call is None or call.query.shape != expected.shape:
        return False
    rounding = max(ROUNDING, UNITS * torch.finfo(query.dtype).eps)
    return bool((call.query - expected).abs().max() <= rounding * expected.abs().max())


def _cut(value: Tensor, index: Tensor, b: int, n: int) -> Tensor:
    """Some tokens of an argument [b, n, ...], [1, n, ...], or [b, 1, n, ...] as rotations are; else as it is."""
    if value.ndim >= 2 and value.shape[0] in (1, b) and value.shape[1] == n:
        dim = 1
    elif value.ndim >= 4 and value.shape[0] in (1, b) and value.shape[2] == n != value.shape[3]:  # masks are not read
        dim = 2
    else:
        return value
    at = index.reshape(b, *(1,) * (dim - 1), -1, *(1,) * (value.ndim - dim - 1))
    whole = value.expand(b, *value.shape[1:])
    return whole.gather(dim, at.expand(*whole.shape[:dim], -1, *whole.shape[dim + 1 :]))


def _again(b: int, r: int, k: int, device: torch.device) -> Int[Tensor, "b kr"]:
    """The places of r tokens, k times."""
    return torch.arange(r, device=device).repeat(k).expand(b, -1)


def _rows(query: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"] | None) -> Float[Tensor, "b h r d"]:
    b, h, _, d = query.shape
    return query if index is None else query.gather(2, index[:, None, :, None].expand(b, h, -1, d))


class _Answered(Exception):  # noqa: N818 - a layer has said all that is wanted
    pass


class _Answer(Receiver):
    """The first call that a layer makes."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def begin(self) -> bool:
        """Every pass is looked at."""
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention | None:
        """That is all."""
        self.call = met.call if isinstance(met.call, Call) else None
        raise _Answered

    def finish(self, missed: tuple[str, ...]) -> None:
        """There was no call."""
