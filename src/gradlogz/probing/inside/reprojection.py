"""A layer, asked what queries and keys it would make of other tokens.

    ask.call(x)                  the call that the layer hands to attention if it reads x, all else being as it was
    ask.some(index).queries(x)   the queries of some tokens of each sequence alone, at their places

The layer is run again with the arguments that it was given, masks and positions included, until it calls attention;
the rest is not computed. Gradients flow from the queries to x.

Read next: weights.py (asked about unit vectors), ../predictions/ascent.py (asked about moved tokens).
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._typing import Float, Int, Tensor
from ...attention.in_models.intercepted_calls import Call
from ...attention.in_models.interception import SOURCES, InterceptedCall, Interception, Receiver
from ...attention.in_models.observation import LAYERS
from ...attention.result import Attention

ROUNDING, UNITS = 1e-3, 4.0  # of float16 and better; in units of rounding where these are larger, as those of bfloat16


class Ask(NamedTuple):
    """A layer and the arguments of one call of it.

    given: the tokens that queries are made of, among them; source: those of keys and values, None if they are the same.
    norm: what the stream passes before the layer reads it.
    parted: whether the layer can be asked about some tokens alone; places: where they are among all, if it cannot.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Float[Tensor, "b m d"]
    source: Float[Tensor, "b n e"] | None
    norm: nn.Module | None = None
    parted: bool = False
    places: Int[Tensor, "b r"] | None = None

    def some(self, index: Int[Tensor, "b r"]) -> "Ask":
        """The layer with some tokens of each sequence: with what its arguments say of these, if it is parted.

        Arguments are cut where a dimension of tokens is recognised; `answers` says whether that is enough.
        """
        if not self.parted:
            return self._replace(places=index)
        b, n = self.given.shape[:2]
        new: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                return new.setdefault(id(value), _cut(value, index, b, n))
            if isinstance(value, (tuple, list)):
                return type(value)(cut(each) for each in value)
            return value

        args, kwargs = tuple(cut(a) for a in self.args), {name: cut(v) for name, v in self.kwargs.items()}
        source = None if self.source is None else new[id(self.source)]
        return self._replace(args=args, kwargs=kwargs, given=new[id(self.given)], source=source)

    def queries(self, streams: Float[Tensor, "k b r d"], *, layers: str = LAYERS) -> Float[Tensor, "b h kr e"] | None:
        """The queries of k versions of the tokens, side by side, read through the norm before the layer."""
        k, b, r, _ = streams.shape
        z = streams if self.norm is None else self.norm(streams)
        if self.places is None:
            calls = [self.some(_again(b, r, k, z.device)).call(z.transpose(0, 1).flatten(1, 2), layers=layers)]
        else:  # the others are 0: what is made of one token does not depend on them
            at = self.places.unsqueeze(-1).expand_as(z[0])
            calls = [self.call(z.new_zeros(self.given.shape).scatter(1, at, each), layers=layers) for each in z]
        found = [_rows(call.query, self.places) for call in calls if call is not None]
        return torch.cat(found, 2) if len(found) == len(calls) else None

    def answers(self, query: Float[Tensor, "b h m d"], index: Int[Tensor, "b r"], *, layers: str = LAYERS) -> bool:
        """Whether the layer, asked about some tokens alone, makes the queries of them that it made among all."""
        part = self._replace(parted=True).some(index)
        try:
            call = part.call(part.given, layers=layers)
        except (RuntimeError, ValueError, TypeError, IndexError):  # it wants arguments of other shapes
            return False
        expected = _rows(query, index)
        if call is None or call.query.shape != expected.shape:
            return False
        rounding = max(ROUNDING, UNITS * torch.finfo(query.dtype).eps)
        return bool((call.query - expected).abs().max() <= rounding * expected.abs().max())

    def call(self, given: Tensor, source: Tensor | None = None, *, layers: str = LAYERS) -> Call | None:
        """The call of the layer for other tokens of the same number; None if it computes its own logits."""
        new: dict[int, Any] = {id(self.given): given}
        if self.source is not None:
            new[id(self.source)] = self.source if source is None else source
        answer = _Answer()
        with suppress(_Answered), Interception(self.module, answer, layers=layers):
            self.module(
                *(new.get(id(a), a) for a in self.args), **{name: new.get(id(v), v) for name, v in self.kwargs.items()}
            )
        return answer.call


def ask_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> Ask | None:
    """A layer with its arguments; None if what it reads is not among them."""
    top = [(None, t) for t in args] + list(kwargs.items())
    tokens = [(name, t) for name, t in top if isinstance(t, Tensor) and t.ndim == 3 and t.is_floating_point()]
    tokens = [(name, t) for name, t in tokens if t.shape[0] == rows]
    if not tokens:
        return None
    given = tokens[0][1]
    others = [t for name, t in tokens if t is not given and (name in SOURCES or name is None)]
    return Ask(module, args, kwargs, given, others[0] if others else None)


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
