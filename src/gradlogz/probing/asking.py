"""A layer, asked what queries and keys it would make of other tokens.

    ask.call(x)      the call that the layer hands to attention if it reads x, everything else being as it was

The layer is run again with the arguments that it was given, masks and positions included, until it calls attention;
the rest is not computed. Gradients flow from the queries to x.

Read next: weights.py (asked about unit vectors), predictions/ascent.py (asked about moved tokens).
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from .._typing import Float, Tensor
from ..attention.calls import Call
from ..attention.observation import LAYERS
from ..attention.result import Attention
from ..attention.watching import SOURCES, Met, Receiver, Watch


class Ask(NamedTuple):
    """A layer and the arguments of one call of it.

    given: the tokens that queries are made of, among them; source: those of keys and values, None if they are the same.
    norm: what the stream passes before the layer reads it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Float[Tensor, "b m d"]
    source: Float[Tensor, "b n e"] | None
    norm: nn.Module | None = None

    def of_stream(self, stream: Float[Tensor, "b m d"], *, layers: str = LAYERS) -> Call | None:
        """The call of the layer if the stream were another, read through the norm before it."""
        return self.call(stream if self.norm is None else self.norm(stream), layers=layers)

    def rows(self, rows: list[int]) -> "Ask":
        """The same for a few sequences of the batch, apart from its memory."""
        b = len(self.given)
        new: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.ndim < 2 or len(value) != b:
                    return value
                return new.setdefault(id(value), value[rows].clone())
            if isinstance(value, (tuple, list)):
                return type(value)(cut(each) for each in value)
            return value

        args, kwargs = tuple(cut(a) for a in self.args), {name: cut(v) for name, v in self.kwargs.items()}
        source = None if self.source is None else new[id(self.source)]
        return Ask(self.module, args, kwargs, new[id(self.given)], source, self.norm)

    def call(self, given: Tensor, source: Tensor | None = None, *, layers: str = LAYERS) -> Call | None:
        """The call of the layer for other tokens of the same number; None if it computes its own logits."""
        new: dict[int, Any] = {id(self.given): given}
        if self.source is not None:
            new[id(self.source)] = self.source if source is None else source
        answer = _Answer()
        with suppress(_Answered), Watch(self.module, answer, layers=layers):
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


class _Answered(Exception):  # noqa: N818 - a layer has said all that is wanted
    pass


class _Answer(Receiver):
    """The first call that a layer makes."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def begin(self) -> bool:
        """Every pass is looked at."""
        return True

    def receive(self, layer: str, met: Met, *, again: bool) -> Attention | None:
        """That is all."""
        self.call = met.call if isinstance(met.call, Call) else None
        raise _Answered

    def unfused(self, layer: str) -> None:
        """It is computed as any other."""

    def finish(self, missed: tuple[str, ...]) -> None:
        """There was no call."""
