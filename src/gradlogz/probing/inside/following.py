"""One pass through a model, followed event by event.

    with follow(model, architecture, tell):
        model(**inputs)                       tell(Attended(...)), tell(Passed(...)), ... in the order of computation

Every event is handed on as soon as it is whole and nothing is kept, so that a pass over a corpus needs no more memory
than a batch. The model computes with `attend` in place of its own attention.

Read next: events.py (what is handed on), capturing.py (all events of one batch, kept).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._errors import InputRuntimeError
from ..._typing import Tensor
from ...attention.in_models.intercepted_calls import Call, Logits
from ...attention.in_models.interception import LAYERS, InterceptedCall, Interception, Receiver, names_of, numbered
from ...attention.result import Attention
from .architecture import Architecture, Sublayer, SumSite
from .events import Attended, AttentionArguments, Event, Normed, Passed
from .hooks import Running, operands, settled, watched, writes
from .reprojection import layer_call_of


@contextmanager
def follow(
    model: nn.Module,
    architecture: Architecture,
    tell: Callable[[Event], None],
    *,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Iterator[None]:
    """Within this context, every event of every pass is told as soon as it is whole."""
    pass_ = _Pass(architecture, tell, statistics)
    with torch.no_grad(), settled(model), watched(model, pass_), pass_, Interception(model, pass_, layers=layers):
        yield


def arguments_of(call: Call) -> AttentionArguments:
    """The arguments of an intercepted call."""
    options = {name: value for name, value in call.options.items() if name in AttentionArguments._fields}
    scale = options.pop("scale", None)
    return AttentionArguments(
        call.query, call.key, call.value, call.query.shape[-1] ** -0.5 if scale is None else float(scale), **options
    )


class _Pass(TorchFunctionMode, Receiver):
    """Looks at the places of a architecture while the model runs."""

    def __init__(self, architecture: Architecture, tell: Callable[[Event], None], statistics: str) -> None:
        super().__init__()
        self._architecture, self._receiver, self._statistics = architecture, tell, statistics
        self._running = Running()
        self._modules: dict[str, nn.Module] = {}  # the norms
        self._layers = {name.partition("#")[0] for name in architecture.attention}
        self._branches: dict[SumSite, list[Sublayer]] = {}
        for sublayer in architecture.sublayers:
            self._branches.setdefault(sublayer.sum, []).append(sublayer)
        self._parts = {s.update[0] for s in architecture.sublayers} - set(self._branches)
        norms = [
            n for s in architecture.sublayers for n in (s.reads, s.closes, s.follows, s.norm_of_stream) if n is not None
        ]
        self._norms = {(norm.name, norm.call): norm for norm in norms}
        self.begin()

    def _tell(self, event: Event) -> None:
        """Hand an event over; what is computed of it is no part of the model."""
        with torch._C.DisableTorchFunction():
            self._receiver(event)

    # Of the interception ---------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """A pass begins."""
        self._running.clear()
        self._calls: dict[str, None] = {}
        self._summed: dict[SumSite, tuple[Tensor, Tensor]] = {}
        self._given: dict[tuple[str, int], Tensor] = {}
        self._arguments: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = {}
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call with `attend`, and tell of it."""
        found = met.call.attend(self._statistics)
        name = numbered(layer, self._calls)
        self._calls[name] = None
        sublayer = self._architecture.of(name)
        again_with = None
        if layer in self._arguments:
            again_with = layer_call_of(*self._arguments[layer], len(found.log_normalizer))
        if again_with is not None:
            norm = None if sublayer is None or sublayer.reads is None else self._modules[sublayer.reads.name]
            again_with = again_with._replace(norm=norm, parted=name in self._architecture.parted)
        call = met.call.logits if isinstance(met.call, Logits) else arguments_of(met.call)
        self._tell(Attended(name, sublayer, call, found, met.crosses, again_with))
        return found

    def finish(self, missed: tuple[str, ...]) -> None:
        """A pass has ended."""
        if missed:
            condition = "every attention layer must make a call that can be seen"
            remedy = "Pass layers= with a pattern that leaves them out."
            raise InputRuntimeError("capture", "model", f"{condition}, got none from {names_of(missed)}", remedy)

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
        if pair is None or pair[0].shape[-1] != self._architecture.width:
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
