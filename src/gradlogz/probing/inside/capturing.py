"""What happens inside a model in one pass: queries, keys and values, and the residual stream about every sublayer.

    captured = capture(model, inputs)
    captured.attention["encoder.layer.3.attention.self"].query       [b, h, n, d]
    captured.sublayers["encoder.layer.3.attention.self"].update      [b, n, D], added to the stream

Events come in the order of computation, so that a pass over a corpus keeps none of them: `follow` hands each to a
function as soon as it is whole. The model computes with `attend` in place of its own attention.

Read next: discovery.py (how the places are found), weights.py (the matrices of each head).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._errors import InputRuntimeError, InputValueError, sentence
from ..._typing import Float, Tensor
from ...attention.in_models.intercepted_calls import Call, Logits
from ...attention.in_models.interception import InterceptedCall, Interception, Receiver, names_of
from ...attention.in_models.observation import LAYERS, numbered
from ...attention.result import Attention
from .architecture import Layout, Norm, Place, Sublayer
from .discovery import trace
from .hooks import Running, operands, settled, watched, without_cache, writes
from .reprojection import Ask, ask_of


class Attended(NamedTuple):
    """One call of attention: its arguments, and the statistics of `attend`.

    call: the query [b, h, m, d], key and value [b, hk, n, d], and the options (masks, scale, sinks, softcap); the
        logits alone where a layer writes out its own softmax.
    ask: the layer with its arguments, to be asked about other tokens; None if what it reads is not among them.
    """

    layer: str
    sublayer: Sublayer | None
    call: Call | Logits
    attention: Attention
    crosses: bool
    ask: Ask | None = None

    @property
    def query(self) -> Float[Tensor, "b h m d"]:
        """The queries as they meet the keys: with rotations, before the scale."""
        return self._call().query

    @property
    def key(self) -> Float[Tensor, "b hk n d"]:
        """The keys, of each group of heads once."""
        return self._call().key

    @property
    def value(self) -> Float[Tensor, "b hk n v"]:
        """The values, of each group of heads once."""
        return self._call().value

    def _call(self) -> Call:
        if isinstance(self.call, Logits):
            condition, fact = (
                f"{self.layer} must hand its queries to a function",
                "a layer that computes its own logits",
            )
            raise InputValueError(sentence("Attended", condition, fact, "Take call.logits."))
        return self.call


class Passed(NamedTuple):
    """A sublayer: stream + update, where update = map(given).

    given: what the map reads: the stream through the norm before it, or the stream.
    after: the sum; of parallel branches, with both.
    """

    sublayer: Sublayer
    stream: Float[Tensor, "b n d"]
    given: Float[Tensor, "b n d"]
    update: Float[Tensor, "b n d"]
    after: Float[Tensor, "b n d"]


class Normed(NamedTuple):
    """A norm of the stream: its input and its output."""

    norm: Norm
    given: Float[Tensor, "b n d"]
    result: Float[Tensor, "b n d"]


Event = Attended | Passed | Normed


class Captured(NamedTuple):
    """One batch inside a model.

    attention: the calls, by layer, in the order of computation; a layer called again is "layer#2".
    sublayers: the residual branches, attention and feed-forward, likewise.
    norms: by the module's name, numbered likewise.
    layout: how the model is built.
    output: what the model returned.
    """

    attention: dict[str, Attended]
    sublayers: dict[str, Passed]
    norms: dict[str, Normed]
    layout: Layout
    output: Any


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Captured:
    """Everything that happens to one batch inside a model, as plain tensors, without gradients.

    Memory grows with the depth; for a corpus use `follow`.

    Args:
        inputs: the keyword arguments of the model.
        layout: from `trace`, to spare a second tracing.
        statistics: as in `attend`.

    Law: tests/laws/test_a_captured_model_is_the_model.py.

    >>> import torch, gradlogz
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> found = gradlogz.capture(block, {"src": torch.randn(2, 10, 16)})
    >>> [(name, s.sublayer.placement) for name, s in found.sublayers.items()]
    [('self_attn', 'post'), ('', 'post')]
    """
    found = Captured({}, {}, {}, trace(model, inputs, layers=layers) if layout is None else layout, None)

    def keep(event: Event) -> None:
        if isinstance(event, Attended):
            found.attention[event.layer] = event
        elif isinstance(event, Passed):
            found.sublayers[event.sublayer.name] = event
        else:
            found.norms[numbered(event.norm.name, found.norms)] = event

    with follow(model, found.layout, keep, statistics=statistics, layers=layers):
        output = model(**inputs, **without_cache(model))
    return found._replace(output=output)


@contextmanager
def follow(
    model: nn.Module,
    layout: Layout,
    tell: Callable[[Event], None],
    *,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Iterator[None]:
    """Within this context, every event of every pass is told as soon as it is whole."""
    pass_ = _Pass(layout, tell, statistics)
    with torch.no_grad(), settled(model), watched(model, pass_), pass_, Interception(model, pass_, layers=layers):
        yield


class _Pass(TorchFunctionMode, Receiver):
    """Looks at the places of a layout while the model runs."""

    def __init__(self, layout: Layout, tell: Callable[[Event], None], statistics: str) -> None:
        super().__init__()
        self._layout, self._told, self._statistics = layout, tell, statistics
        self._running = Running()
        self._modules: dict[str, nn.Module] = {}  # the norms
        self._layers = {name.partition("#")[0] for name in layout.attention}
        self._branches: dict[Place, list[Sublayer]] = {}
        for sublayer in layout.sublayers:
            self._branches.setdefault(sublayer.sum, []).append(sublayer)
        self._parts = {s.update[0] for s in layout.sublayers} - set(self._branches)
        norms = [n for s in layout.sublayers for n in (s.reads, s.closes, s.follows, s.norm_of_stream) if n is not None]
        self._norms = {(norm.name, norm.call): norm for norm in norms}
        self.begin()

    def _tell(self, event: Event) -> None:
        """Hand an event over; what is computed of it is no part of the model."""
        with torch._C.DisableTorchFunction():
            self._told(event)

    # Of the watch ----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """A pass begins."""
        self._running.clear()
        self._calls: dict[str, None] = {}
        self._summed: dict[Place, tuple[Tensor, Tensor]] = {}
        self._given: dict[tuple[str, int], Tensor] = {}
        self._arguments: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = {}
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call with `attend`, and tell of it."""
        found = met.call.attend(self._statistics)
        name = numbered(layer, self._calls)
        self._calls[name] = None
        sublayer = self._layout.of(name)
        ask = ask_of(*self._arguments[layer], len(found.log_normalizer)) if layer in self._arguments else None
        if ask is not None:
            norm = None if sublayer is None or sublayer.reads is None else self._modules[sublayer.reads.name]
            ask = ask._replace(norm=norm, parted=name in self._layout.parted)
        self._tell(Attended(name, sublayer, met.call, found, met.crosses, ask))
        return found

    def finish(self, missed: tuple[str, ...]) -> None:
        """A pass has ended."""
        if missed:
            condition = "every attention layer must make a call that can be seen"
            remedy = "Pass layers= with a pattern that leaves them out."
            raise InputRuntimeError(sentence("capture", condition, f"none from {names_of(missed)}", remedy))

    # Of the modules --------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module begins."""
        if not name:
            self.begin()
        self._running.enter(name)
        if name in self._layers:
            self._arguments[name] = (module, args, kwargs)

    def leave(self, name: str, module: nn.Module, given: Tensor | None, result: Tensor | None) -> None:
        """A module has ended: if it is a norm of the stream, tell of it."""
        norm = self._norms.get(self._running.leave(name))
        if norm is not None and given is not None and result is not None:
            self._given[norm.name, norm.call] = result
            self._modules[norm.name] = module
            self._tell(Normed(norm, given, result))

    # Of the functions ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pair = operands(func, args)
        if pair is None or pair[0].shape[-1] != self._layout.width:
            return func(*args, **kwargs)
        place = self._running.summed()
        if place not in self._branches and place not in self._parts:
            return func(*args, **kwargs)
        if writes(func):
            pair = (pair[0].clone(), pair[1])
        result = func(*args, **kwargs)
        self._summed[place] = pair
        for sublayer in self._branches.get(place, ()):
            stream = pair[sublayer.stream]
            where, side = sublayer.update
            given = stream if sublayer.reads is None else self._given[sublayer.reads.name, sublayer.reads.call]
            self._tell(Passed(sublayer, stream, given, self._summed[where][side], result))
        if place in self._branches:
            self._summed.clear()
        return result
