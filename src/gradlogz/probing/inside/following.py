"""Events of a pass through a model, handled one by one.

    with follow(model, architecture, handle):
        model(**inputs)                     handle(Attended(...)), handle(Passed(...)), ... in the order of computation

Each event is passed to the handler as soon as it is complete and is not stored, so that a pass over a corpus needs no
more memory than one batch. The model computes with `attend` in place of its own attention.

Read next: events.py (the events), capturing.py (all events of one batch, stored).
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
from .feed_forward import maps_of
from .hooks import Running, evaluation_mode, module_hooks, operands, writes
from .reprojection import layer_call_of


@contextmanager
def follow(
    model: nn.Module,
    architecture: Architecture,
    handle: Callable[[Event], None],
    *,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Iterator[None]:
    """Context in which every event of every pass is given to `handle` as soon as it is complete."""
    pass_ = _Pass(model, architecture, handle, statistics)
    intercepted = Interception(model, pass_, layers=layers)
    with torch.no_grad(), evaluation_mode(model), module_hooks(model, pass_), pass_, intercepted:
        yield


def arguments_of(call: Call) -> AttentionArguments:
    """Return the arguments of an intercepted call."""
    options = {name: value for name, value in call.options.items() if name in AttentionArguments._fields}
    scale = options.pop("scale", None)
    return AttentionArguments(
        call.query, call.key, call.value, call.query.shape[-1] ** -0.5 if scale is None else float(scale), **options
    )


def _outputs(model: nn.Module, architecture: Architecture) -> Mapping[str, nn.Module]:
    """Return the map from heads to the update of each layer: its output projection, and the norm that closes it."""
    outputs = {}
    for layer, home in architecture.outputs.items():
        sublayer = architecture.branch_of(layer)
        closes = None if sublayer is None else sublayer.closes
        norms = [] if closes is None else [model.get_submodule(closes.name)]
        outputs[layer] = nn.Sequential(model.get_submodule(home), *norms)
    return outputs


class _Pass(TorchFunctionMode, Receiver):
    """Observer of a running model that makes an event at each site of its architecture."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, handle: Callable[[Event], None], statistics: str
    ) -> None:
        super().__init__()
        self._architecture, self._handle, self._statistics = architecture, handle, statistics
        self._projections = {layer: model.get_submodule(name) for layer, name in architecture.outputs.items()}
        self._outputs = _outputs(model, architecture)
        self._maps = maps_of(model, architecture.feed_forward)
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

    def _emit(self, event: Event) -> None:
        """Give an event to the handler; the handler's computation is not part of the pass."""
        with torch._C.DisableTorchFunction():
            self._handle(event)

    # Called by the interception of attention --------------------------------------------------------------------------

    def begin(self) -> bool:
        """Clear the record of the preceding pass."""
        self._running.clear()
        self._calls: dict[str, None] = {}
        self._summed: dict[SumSite, tuple[Tensor, Tensor]] = {}
        self._normalized: dict[tuple[str, int], Tensor] = {}  # outputs of the norms
        self._arguments: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = {}
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call with `attend`, and make an event of it."""
        attention = met.call.attend(self._statistics)
        name = numbered(layer, self._calls)
        self._calls[name] = None
        sublayer = self._architecture.branch_of(name)
        layer_call = None
        if layer in self._arguments:
            layer_call = layer_call_of(*self._arguments[layer], len(attention.log_normalizer))
        if layer_call is not None:
            norm = None if sublayer is None or sublayer.reads is None else self._modules[sublayer.reads.name]
            parted, output = name in self._architecture.parted, self._outputs.get(name)
            layer_call = layer_call._replace(norm=norm, parted=parted, output=output)
        call = met.call.logits if isinstance(met.call, Logits) else arguments_of(met.call)
        projection = self._projections.get(name)
        self._emit(Attended(name, sublayer, call, attention, met.crosses, layer_call, projection))
        return attention

    def finish(self, missed: tuple[str, ...]) -> None:
        """Raise at the end of a pass if the call of an attention layer was not intercepted."""
        if missed:
            problem = f"no call of attention could be intercepted in {names_of(missed)}"
            remedy = "Pass layers= with a pattern that excludes these layers."
            raise InputRuntimeError("capture", "model", problem, remedy)

    # Called by the hooks of the modules -------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the beginning of a module call; the root module begins a pass."""
        if not name:
            self.begin()
        self._running.enter(name)
        if name in self._layers:
            self._arguments[name] = (module, args, kwargs)

    def leave(self, name: str, module: nn.Module, argument: Tensor | None, result: Tensor | None) -> None:
        """Record the end of a module call; make an event if it is a norm of the residual stream."""
        norm = self._norms.get(self._running.leave(name))
        if norm is not None and argument is not None and result is not None:
            self._normalized[norm.name, norm.call] = result
            self._modules[norm.name] = module
            self._emit(Normed(norm, argument, result))

    # Called by every torch function -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pair = operands(func, args)
        if pair is None or pair[0].shape[-1] != self._architecture.width:
            return func(*args, **kwargs)
        site = self._running.summed()
        if site not in self._branches and site not in self._parts:
            return func(*args, **kwargs)
        if writes(func):
            pair = (pair[0].clone(), pair[1])
        result = func(*args, **kwargs)
        self._summed[site] = pair
        for sublayer in self._branches.get(site, ()):
            stream, norm = pair[sublayer.stream], sublayer.reads
            update_site, operand = sublayer.update
            branch_input = stream if norm is None else self._normalized[norm.name, norm.call]
            update, feed_forward = self._summed[update_site][operand], self._maps.get(sublayer.name)
            self._emit(Passed(sublayer, stream, branch_input, update, result, feed_forward))
        if site in self._branches:
            self._summed.clear()
        return result
