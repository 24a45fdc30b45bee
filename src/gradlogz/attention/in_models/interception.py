"""Interception of the attention calls of a running model, each with the name of the layer that makes it.

    Hugging Face      the attention function that transformers returns to a layer is wrapped
    torch             a torch function mode intercepts scaled_dot_product_attention and attend
    softmax           the mode intercepts it over the last dimension, inside a layer with the class name of attention
    nn.Multihead…     is hooked as a module, since torch computes it in one function

Hooks and patches are installed only inside the context of an `Interception`; several contexts may end in any order. A
layer of a kind without softmax is reported to the receiver as such; another attention layer that ran without an
intercepted call is reported as missed.

Read next: observation.py and monitoring.py, which receive the calls.
"""

import inspect
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..._typing import Tensor
from ..functional import attend
from ..layers.multihead import MultiheadAttention
from ..result import Attention
from .hooks import Hook, in_backward
from .intercepted_calls import (
    NAME,
    Call,
    Logits,
    call_from_attend,
    call_from_interface,
    call_from_sdpa,
    logits_from_softmax,
)
from .layer_kinds import kind_without_softmax

# Class names of attention layers.
LAYERS = r"(?i)attention|attn"
SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
# Prefixes of wrapped modules: distributed training, sharding, checkpointing, compilation.
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)")


# Argument names of cross-attention layers for the tokens to attend to.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory")


class InterceptedCall(NamedTuple):
    """A call, and the conversion of a result of `attend` to the one its layer expects; None for a softmax."""

    call: Call | Logits
    to_layer: Callable[[Attention], Any] | None
    crosses: bool = False  # True if the keys are known to be other tokens than the queries (cross-attention)
    by_attend: bool = False  # True if the layer computes by `attend`, and the receiver may do so in its place


class Receiver(ABC):
    """Receiver of the intercepted calls.

    `functions` maps further functions that are intercepted to the functions that convert their arguments to a call.
    """

    functions: Mapping[Any, Callable[..., Any]] = MappingProxyType({})

    @abstractmethod
    def begin(self) -> bool:
        """Begin a pass through the model; return whether its calls are to be intercepted."""

    @abstractmethod
    def receive(self, layer: str, intercepted: InterceptedCall, *, again: bool) -> Attention | None:
        """Return a result that replaces the model's own, or None to let the model compute.

        `again` is True when a checkpoint is recomputed.
        """

    def unfused(self, layer: str) -> None:  # noqa: B027
        """Handle a layer whose fused operator the hooks disable: results change by rounding. Default: do nothing."""

    def accept_without_softmax(self, layer: str, kind: str) -> bool:
        """Record a layer of linear or sigmoid attention; return False (the default) to count it as missed."""
        return False

    @abstractmethod
    def finish(self, missed: tuple[str, ...]) -> None:
        """End a pass; `missed` names attention layers, with their classes, that ran without an intercepted call."""


class Interception:
    """Context in which a receiver gets every attention call of a model.

    Args:
        layers: a regular expression for the class names of attention layers.
    """

    def __init__(self, model: nn.Module, receiver: Receiver, *, layers: str) -> None:
        self.receiver = receiver
        self.names = {id(module): WRAPPERS.sub("", name).strip(".") for name, module in model.named_modules()}
        self._modules = [module for module in model.modules() if module is model or _may_attend(module)]
        self._attention = {id(module) for module in model.modules() if is_attention(module, layers)}
        self._expected = {
            id(layer) for layer in model.modules() if is_attention(layer, layers) and _has_matrices(layer)
        }
        kinds = [(layer, kind_without_softmax(layer)) for layer in model.modules()]
        self._without_softmax = {id(each): kind for each, kind in kinds if kind is not None and _has_matrices(each)}
        self._hooks: list[Any] = []
        self._fused: list[Any] = []  # hooks of layers for which torch has a fused operator, which any hook disables
        self._running = _RunningModules()

    def __enter__(self) -> "Interception":
        with _patching:
            _interceptions.append(self)
            _intercept_transformers()
        self._hooks = [
            h for module in self._modules if not _is_torch_layer(module) for h in self._register_hooks(module)
        ]
        self._hook_torch_layers()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_pass()
        self._unhook_torch_layers()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with _patching:
            _interceptions.remove(self)
            _restore_transformers()

    def layer(self, module: nn.Module | None) -> str | None:
        """Name of the layer that is running; None outside the model."""
        if module is not None and id(module) in self.names:
            return self.names[id(module)]
        return self.names[id(self._running.stack[-1].module)] if self._running.stack else None

    def crosses(self) -> bool:
        """Return whether the innermost attention layer that is running is cross-attention."""
        return next((frame.crosses for frame in reversed(self._running.stack) if frame.attention), False)

    def returns_weights(self) -> bool:
        """Return whether the model was called with output_attentions=True."""
        return any(frame.returns_weights for frame in self._running.stack)

    def in_attention(self) -> bool:
        """Return whether an attention layer is running, so that a softmax belongs to attention."""
        return any(frame.attention for frame in self._running.stack)

    def count_call(self) -> None:
        """Count an intercepted call for every module that is running."""
        for frame in self._running.stack:
            frame.calls += 1

    # The modules that are running ------------------------------------------------------------------------------------

    def _register_hooks(self, module: nn.Module) -> list[Any]:
        """Hooks that run outside all others: the hooks of others may offload the weights after a layer."""
        return [
            module.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(self._leave), prepend=True, always_call=True, with_kwargs=True),
        ]

    def _hook_torch_layers(self) -> None:
        if not self._fused:
            self._fused = [
                h for module in self._modules if _is_torch_layer(module) for h in self._register_hooks(module)
            ]

    def _unhook_torch_layers(self) -> None:
        for hook in self._fused:
            hook.remove()
        self._fused = []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) not in self.names:
            return  # a shallow copy, which shares the hooks of the original
        running = self._running
        if running.stack and running.stack[0].module is module and not _is_running(running.caller):
            self._end_pass()
        if not running.stack:
            running.missed, running.caller = [], _caller()
            if in_backward() or self.receiver.begin():
                running.mode = _AttentionMode(self.receiver.functions)
                running.mode.__enter__()
            elif not _is_torch_layer(module):
                self._unhook_torch_layers()  # this pass is not intercepted: keep the fused operator
        attention = id(module) in self._attention
        crosses = attention and _is_cross_attention(module, args, kwargs)
        running.stack.append(_Frame(module, attention, crosses, bool(kwargs.get("output_attentions"))))
        if running.mode is not None and _is_torch_layer(module) and _uses_fused_operator(module, args, kwargs):
            self.receiver.unfused(self.names[id(module)])

    def _end_pass(self) -> None:
        """End a pass, also an interrupted one: torch calls no hooks on KeyboardInterrupt."""
        running = self._running
        self._hook_torch_layers()
        running.stack.clear()
        running.caller = None
        if running.mode is not None:
            running.mode.__exit__(None, None, None)
            running.mode = None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        running = self._running
        if not running.stack or running.stack[-1].module is not module:
            return  # it was not entered
        frame, intercepts = running.stack.pop(), running.mode is not None and not in_backward()
        failed = sys.exc_info()[1] is not frame.error
        try:
            if running.mode is not None and not failed and not frame.calls:
                self._handle_uncalled(module, args, kwargs, frame)
        finally:
            if not running.stack:
                self._end_pass()
        if intercepts and not failed and not running.stack:
            self.receiver.finish(tuple(dict.fromkeys(running.missed)))

    def _handle_uncalled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: "_Frame"
    ) -> None:
        """Handle a module that ran without an intercepted call: torch's layer, a missed layer, or no attention."""
        name = self.names[id(module)]
        if _is_torch_layer(module):
            self.count_call()
            with not_intercepted():
                call = _call_from_multihead(module, *args, **kwargs)  # type: ignore[arg-type]
                intercepted = InterceptedCall(call, None, frame.crosses)
                self.receiver.receive(name, intercepted, again=in_backward())
        elif in_backward():
            return
        elif id(module) in self._without_softmax and self._accepts(name, module):
            self.count_call()  # so that the modules around it are not missed too
        elif id(module) in self._expected:
            self.count_call()
            self._running.missed.append(named(name, module))

    def _accepts(self, name: str, module: nn.Module) -> bool:
        return self.receiver.accept_without_softmax(name, self._without_softmax[id(module)])


class _Frame:
    """A module that is running."""

    __slots__ = ("attention", "calls", "crosses", "error", "module", "returns_weights")

    def __init__(self, module: nn.Module, attention: bool, crosses: bool, returns_weights: bool) -> None:
        self.module, self.attention, self.crosses, self.calls = module, attention, crosses, 0
        self.returns_weights = returns_weights
        self.error = sys.exc_info()[1]  # an exception that is handled around the module is not its failure


class _RunningModules(threading.local):
    """Modules that are running in this thread: autograd recomputes checkpoints in its own threads."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.mode: _AttentionMode | None = None
        self.missed: list[str] = []
        self.caller: FrameType | None = None  # the caller of the outermost module


def _caller() -> FrameType:
    """Frame in which torch calls the hooks of a module, and then the module."""
    return sys._getframe(3)


def _is_running(frame: FrameType | None) -> bool:
    """Return whether a frame is still on the stack: distinguishes a recursive call from an interrupted one."""
    each: FrameType | None = sys._getframe()
    while each is not None and each is not frame:
        each = each.f_back
    return each is not None


def _may_attend(module: nn.Module) -> bool:
    """Return whether a module may call attention: of torch's own layers only MultiheadAttention does."""
    return isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith("torch.nn.modules")


def _is_torch_layer(module: nn.Module) -> bool:
    """Return whether the module is torch's multi-head attention, computed in one function of known arguments."""
    return type(module).forward in (nn.MultiheadAttention.forward, MultiheadAttention.forward)


def _uses_fused_operator(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch would compute the layer by its fused operator, as for frozen layers in eval mode."""
    shaped = module.batch_first and module.num_heads % 2 == 0 and module.in_proj_bias is not None
    if module.training or not shaped or not torch.backends.mha.get_fastpath_enabled():
        return False
    tensors = (*module.parameters(), *args, *kwargs.values())
    trained = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return not (trained and torch.is_grad_enabled()) and not torch._C._is_any_autocast_enabled()


def _is_cross_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a layer gets other tokens to attend to, by its arguments: shapes may not show it."""
    arguments = dict(zip(_parameters(type(module).forward), args, strict=False)) | kwargs
    if isinstance(module, nn.MultiheadAttention):
        return arguments.get("query") is not arguments.get("key")
    return any(arguments.get(name) is not None for name in SOURCES)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def attention_layers(model: nn.Module, layers: str) -> list[tuple[str, nn.Module]]:
    """Innermost modules with matrices and a class name of attention, as pairs of name and module."""
    named = {id(m): (name, m) for name, m in model.named_modules() if is_attention(m, layers) and _has_matrices(m)}
    return [(name, m) for name, m in named.values() if not any(id(p) in named for p in m.modules() if p is not m)]


def is_attention(module: nn.Module, layers: str) -> bool:
    """Return whether a class name is one of attention; subclasses of torch's layer count under any name."""
    torchs = "MultiheadAttention" if isinstance(module, nn.MultiheadAttention) else ""
    return re.search(layers, type(module).__name__) is not None or re.search(layers, torchs) is not None


def _has_matrices(module: nn.Module) -> bool:
    """Return whether a module has two matrices or more; without them it is a mask, a rotation or a norm."""
    return sum(p.ndim >= 2 for p in module.parameters()) >= 2


# The calls -----------------------------------------------------------------------------------------------------------

_interceptions: list[Interception] = []
_patching = threading.Lock()
_suspended = threading.local()


@contextmanager
def not_intercepted() -> Iterator[None]:
    """Context without interception: for the inside of an intercepted call, and for our own computations."""
    before = getattr(_suspended, "active", False)
    _suspended.active = True
    try:
        yield
    finally:
        _suspended.active = before


def _intercept(module: nn.Module | None, convert: Callable[[], InterceptedCall], run: Callable[[], Any]) -> Any:
    """Hand a call to the receivers of all models that are running; return a receiver's result, or that of run()."""
    running = [] if getattr(_suspended, "active", False) else [(i, i.layer(module)) for i in tuple(_interceptions)]
    running = [(interception, layer) for interception, layer in running if layer is not None]
    if not running:
        return run()
    intercepted, result = convert(), None
    if len(running) > 1:  # only one receiver may compute: each call with dropout draws a random number
        intercepted = intercepted._replace(by_attend=False)
    with not_intercepted():
        for interception, layer in running:
            interception.count_call()
            answer = interception.receiver.receive(
                layer or "", intercepted._replace(crosses=interception.crosses()), again=in_backward()
            )
            result = answer if result is None else result
        return run() if result is None or intercepted.to_layer is None else intercepted.to_layer(result)


class _AttentionMode(TorchFunctionMode):
    """Torch function mode that intercepts attention while a model runs, by `attend` and functions like it."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._converters = {attend: call_from_attend, **functions}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled function inside the model keeps its graph
            return func(*args, **kwargs)
        run = partial(func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _intercept(None, lambda: InterceptedCall(call_from_sdpa(*args, **kwargs), _output), run)
        if func in self._converters:
            convert = self._converters[func]
            return _intercept(None, lambda: InterceptedCall(convert(*args, **kwargs), _itself, by_attend=True), run)
        if func in SOFTMAX and _is_attention_softmax(*args, **kwargs):
            return _intercept(
                None,
                lambda: InterceptedCall(
                    logits_from_softmax(_innermost_module(), args[0] if args else kwargs["input"]), None
                ),
                run,
            )
        return run()


def _output(result: Attention) -> Tensor:
    return result.output


def _itself(result: Attention) -> Attention:
    return result


def _is_attention_softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
    last = dim is not None and input.ndim >= 3 and dim in (-1, input.ndim - 1)
    return last and any(interception.in_attention() for interception in tuple(_interceptions))


def _innermost_module() -> nn.Module:
    return next(
        interception._running.stack[-1].module for interception in tuple(_interceptions) if interception._running.stack
    )


# Hugging Face --------------------------------------------------------------------------------------------------------

_original: list[tuple[Any, Any]] = []


def _intercept_transformers() -> None:
    """Make transformers return attention functions whose calls are intercepted."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or _original:
        return
    interface = modeling.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling() or attn_implementation == NAME:
            return function  # another model, which keeps its graph; or one that calls `attend`, which is intercepted
        return partial(_from_interface, attn_implementation, function)

    interface.get_interface = get_interface
    _original.append((interface, original))


def _restore_transformers() -> None:
    if _original and not _interceptions:
        interface, original = _original.pop()
        interface.get_interface = original


def _from_interface(
    implementation: str, function: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Attention function for transformers: returns (output [b, m, h, v], weights or None)."""

    def convert() -> InterceptedCall:
        call = call_from_interface(implementation, module, query, key, value, attention_mask, **kwargs)
        by_config = getattr(getattr(module, "config", None), "output_attentions", False)
        wanted = by_config or any(interception.returns_weights() for interception in tuple(_interceptions))

        def to_layer(result: Attention) -> tuple[Tensor, Tensor | None]:
            return result.output.transpose(1, 2).contiguous(), call.weights() if wanted else None

        return InterceptedCall(call, to_layer)

    return _intercept(module, convert, partial(function, module, query, key, value, attention_mask, *args, **kwargs))


def _call_from_multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001
    is_causal: bool = False,
) -> Call:
    """Convert a call of torch.nn.MultiheadAttention; its projections are computed a second time."""
    layer = module if isinstance(module, MultiheadAttention) else MultiheadAttention.from_torch(module)
    return call_from_attend(
        **layer.arguments(query, key, value, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal)
    )


def numbered(layer: str, names: Mapping[str, Any]) -> str:
    """Name of a call: that of the layer, with "#2" and so on from its second call."""
    name, count = layer, 1
    while name in names:
        count += 1
        name = f"{layer}#{count}"
    return name


def named(name: str, layer: nn.Module) -> str:
    """Name and class of a layer: patterns of layers match the class."""
    return f"{name} ({type(layer).__name__})"


def names_of(layers: tuple[str, ...]) -> str:
    """The first names, joined for a message."""
    return ", ".join(layers[:4]) + (f" and {len(layers) - 4} others" if len(layers) > 4 else "")


def unwrapped(model: nn.Module) -> nn.Module:
    """Module inside the wrappers for distributed training and compilation."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner
