"""Where a model computes attention: every call met while it runs, with the name of the layer that makes it.

    Hugging Face      layers that ask transformers for their attention function are met between asking and calling
    torch             scaled_dot_product_attention and attend, wherever they are called
    softmax           over the last dimension, inside a layer whose class is named after attention
    nn.Multihead…     is met as a module, since torch computes it in one function

Nothing is installed but while an `Interception` is entered, and everything is taken away when it is left, in whatever
order.
A layer that ran and of which no call was met is missed: `Interception` says so rather than leave it out.

Read next: observation.py and monitoring.py, which do something with the calls.
"""

import inspect
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..._typing import Tensor
from ..functional import attend
from ..layers.multihead import MultiheadAttention
from ..result import Attention
from .intercepted_calls import Call, Logits, of_attend, of_interface, of_sdpa, of_softmax

# Class names of attention layers.
LAYERS = r"(?i)attention|attn"
SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
# What wrappers put before the name of a module: distributed training, sharding, checkpointing, compilation.
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)")


# What layers call the tokens that they attend to, where those are not their own.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory")


class InterceptedCall(NamedTuple):
    """A call, and how the layer that makes it takes a result of `attend`; None if it only asks for a softmax."""

    call: Call | Logits
    taken: Callable[[Attention], Any] | None
    crosses: bool = False  # whether the keys are known to be other tokens than the queries


class Receiver(ABC):
    """What is done with the calls."""

    @abstractmethod
    def begin(self) -> bool:
        """A pass through the model begins; whether it is to be looked at."""

    @abstractmethod
    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention | None:
        """What is to stand in the place of the model's own result, None to leave that.

        `again`: it is the recomputation of a checkpoint.
        """

    def unfused(self, layer: str) -> None:  # noqa: B027
        """A layer that torch would otherwise compute by a fused operator, equal to rounding. By default nothing."""

    @abstractmethod
    def finish(self, missed: tuple[str, ...]) -> None:
        """The pass has ended; the layers named ran and no call of them was met."""


class Interception:
    """Every attention computation inside a model, handed to a receiver while this is entered.

    Args:
        layers: a regular expression for the class names of attention layers.
    """

    def __init__(self, model: nn.Module, receiver: Receiver, *, layers: str) -> None:
        self.receiver = receiver
        self.names = {id(module): WRAPPERS.sub("", name).strip(".") for name, module in model.named_modules()}
        self._modules = [module for module in model.modules() if module is model or _may_attend(module)]
        self._attention = {id(module) for module in model.modules() if _named(module, layers)}
        self._expected = {id(layer) for layer in model.modules() if _named(layer, layers) and _projects(layer)}
        self._hooks: list[Any] = []
        self._fused: list[Any] = []  # hooks of layers that torch computes otherwise where there are any
        self._here = _RunningModules()

    def __enter__(self) -> "Interception":
        with _patching:
            _interceptions.append(self)
            _intercept_transformers()
        self._hooks = [h for module in self._modules if not _is_torchs(module) for h in self._hooked(module)]
        self._hook_torchs()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._abandon()
        self._unhook_torchs()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with _patching:
            _interceptions.remove(self)
            _leave_transformers()

    def layer(self, module: nn.Module | None) -> str | None:
        """The name of the layer in which something happens now; None outside the model."""
        if module is not None and id(module) in self.names:
            return self.names[id(module)]
        return self.names[id(self._here.stack[-1].module)] if self._here.stack else None

    def crosses(self) -> bool:
        """Whether the innermost attention layer was handed tokens to attend to."""
        return next((frame.crosses for frame in reversed(self._here.stack) if frame.attention), False)

    def softens(self) -> bool:
        """Whether a softmax that happens now is one of attention."""
        return any(frame.attention for frame in self._here.stack)

    def note(self) -> None:
        """A call was met here."""
        for frame in self._here.stack:
            frame.calls += 1

    # Where in the model the computation is ---------------------------------------------------------------------------

    def _hooked(self, module: nn.Module) -> list[Any]:
        """Hooks that run outside all others: what else is hooked on may have put the weights away after a layer."""
        return [
            module.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(self._leave), prepend=True, always_call=True, with_kwargs=True),
        ]

    def _hook_torchs(self) -> None:
        if not self._fused:
            self._fused = [h for module in self._modules if _is_torchs(module) for h in self._hooked(module)]

    def _unhook_torchs(self) -> None:
        for hook in self._fused:
            hook.remove()
        self._fused = []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) not in self.names:
            return  # a shallow copy, which has the hooks of the original
        here = self._here
        if here.stack and here.stack[0].module is module and not _runs(here.caller):
            self._abandon()
        if not here.stack:
            here.missed, here.caller = [], _caller()
            if in_backward() or self.receiver.begin():
                here.mode = _Mode()
                here.mode.__enter__()
            elif not _is_torchs(module):
                self._unhook_torchs()  # a fused layer would compute otherwise, and nobody looks
        attention = id(module) in self._attention
        here.stack.append(_Frame(module, attention, attention and _crosses(module, args, kwargs)))
        if here.mode is not None and _is_torchs(module) and _fuses(module, args, kwargs):
            self.receiver.unfused(self.names[id(module)])

    def _abandon(self) -> None:
        """End a pass, also one that never ended: torch calls no hook on KeyboardInterrupt."""
        here = self._here
        self._hook_torchs()
        here.stack.clear()
        here.caller = None
        if here.mode is not None:
            here.mode.__exit__(None, None, None)
            here.mode = None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        here = self._here
        if not here.stack or here.stack[-1].module is not module:
            return  # it was not entered
        frame, looks = here.stack.pop(), here.mode is not None and not in_backward()
        failed = sys.exc_info()[1] is not frame.error
        try:
            if here.mode is not None and not failed and not frame.calls:
                self._look(module, args, kwargs, frame)
        finally:
            if not here.stack:
                self._abandon()
        if looks and not failed and not here.stack:
            self.receiver.finish(tuple(dict.fromkeys(here.missed)))

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: "_Frame") -> None:
        """A module has run in which no call was met: it is torch's layer, or missed, or nothing to be seen."""
        name = self.names[id(module)]
        if _is_torchs(module):
            self.note()
            with not_intercepted():
                call = _of_multihead(module, *args, **kwargs)  # type: ignore[arg-type]
                met = InterceptedCall(call, None, frame.crosses)
                self.receiver.receive(name, met, again=in_backward())
        elif id(module) in self._expected and not in_backward():
            self.note()  # what it is part of is not missed once more
            self._here.missed.append(name)


class Hook:
    """A hook that stays behind when the model is copied or saved: there it does nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *given: Any) -> None:
        self._run(*given)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*given: Any) -> None:
    pass


class _Frame:
    """A module that is running."""

    __slots__ = ("attention", "calls", "crosses", "error", "module")

    def __init__(self, module: nn.Module, attention: bool, crosses: bool) -> None:
        self.module, self.attention, self.crosses, self.calls = module, attention, crosses, 0
        self.error = sys.exc_info()[1]  # one that is being handled outside is none of this module's


class _RunningModules(threading.local):
    """The modules that are running in this thread: autograd recomputes checkpoints in threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.mode: _Mode | None = None
        self.missed: list[str] = []
        self.caller: FrameType | None = None  # of the outermost module


def _caller() -> FrameType:
    """Where torch calls the hooks of a module, and then the module."""
    return sys._getframe(3)


def _runs(frame: FrameType | None) -> bool:
    """Whether a frame has not ended: a module that calls itself is another thing than one that was interrupted."""
    each: FrameType | None = sys._getframe()
    while each is not None and each is not frame:
        each = each.f_back
    return each is not None


def _may_attend(module: nn.Module) -> bool:
    """Whether a module might call attention itself: torch's own layers do not, but for this one."""
    return isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith("torch.nn.modules")


def _is_torchs(module: nn.Module) -> bool:
    """Whether torch computes the attention of this module in one function, from arguments that are known."""
    return type(module).forward in (nn.MultiheadAttention.forward, MultiheadAttention.forward)


def _fuses(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch takes its fused operator for a layer, as it does for frozen ones in eval mode."""
    shaped = module.batch_first and module.num_heads % 2 == 0 and module.in_proj_bias is not None
    if module.training or not shaped or not torch.backends.mha.get_fastpath_enabled():
        return False
    given = (*module.parameters(), *args, *kwargs.values())
    trained = any(isinstance(t, Tensor) and t.requires_grad for t in given)
    return not (trained and torch.is_grad_enabled()) and not torch._C._is_any_autocast_enabled()


def _crosses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer is handed the tokens to attend to: with as many of them as queries, no shape tells."""
    given = dict(zip(_parameters(type(module).forward), args, strict=False)) | kwargs
    if isinstance(module, nn.MultiheadAttention):
        return given.get("query") is not given.get("key")
    return any(given.get(name) is not None for name in SOURCES)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def attention_layers(model: nn.Module, layers: str) -> list[tuple[str, nn.Module]]:
    """The innermost modules that are named after attention and have matrices, with their names."""
    named = {id(m): (name, m) for name, m in model.named_modules() if _named(m, layers) and _projects(m)}
    return [(name, m) for name, m in named.values() if not any(id(p) in named for p in m.modules() if p is not m)]


def _named(module: nn.Module, layers: str) -> bool:
    """Whether a module is named after attention; torch's layer is under whatever name."""
    torchs = "MultiheadAttention" if isinstance(module, nn.MultiheadAttention) else ""
    return re.search(layers, type(module).__name__) is not None or re.search(layers, torchs) is not None


def _projects(module: nn.Module) -> bool:
    """Whether a module has two matrices: what is named after attention and has none is a mask, a rotation, a norm."""
    return sum(p.ndim >= 2 for p in module.parameters()) >= 2


def in_backward() -> bool:
    """Whether this runs inside the backward pass: a checkpoint recomputes what was seen before."""
    return torch._C._current_graph_task_id() != -1


# Meeting the calls ---------------------------------------------------------------------------------------------------

_interceptions: list[Interception] = []
_patching = threading.Lock()
_busy = threading.local()


@contextmanager
def not_intercepted() -> Iterator[None]:
    """What is computed here is the inside of a call, or our own."""
    before = getattr(_busy, "yes", False)
    _busy.yes = True
    try:
        yield
    finally:
        _busy.yes = before


def _hand(module: nn.Module | None, meet: Callable[[], InterceptedCall], run: Callable[[], Any]) -> Any:
    """The result of a call, made by run() or by a receiver; every one in whose model it happens is given the call."""
    inside = [] if getattr(_busy, "yes", False) else [(w, w.layer(module)) for w in tuple(_interceptions)]
    inside = [(watch, layer) for watch, layer in inside if layer is not None]
    if not inside:
        return run()
    met, found = meet(), None
    with not_intercepted():
        for watch, layer in inside:
            watch.note()
            own = watch.receiver.receive(layer or "", met._replace(crosses=watch.crosses()), again=in_backward())
            found = own if found is None else found
        return run() if found is None or met.taken is None else met.taken(found)


class _Mode(TorchFunctionMode):
    """Sees every function of torch that is called while the model runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled function inside the model, which is to be the same graph as ever
            return func(*args, **kwargs)
        run = partial(func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _hand(None, lambda: InterceptedCall(of_sdpa(*args, **kwargs), _output), run)
        if func is attend:
            return _hand(None, lambda: InterceptedCall(of_attend(*args, **kwargs), _itself), run)
        if func in SOFTMAX and _of_attention(*args, **kwargs):
            return _hand(
                None, lambda: InterceptedCall(of_softmax(_innermost(), args[0] if args else kwargs["input"]), None), run
            )
        return run()


def _output(found: Attention) -> Tensor:
    return found.output


def _itself(found: Attention) -> Attention:
    return found


def _of_attention(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
    last = dim is not None and input.ndim >= 3 and dim in (-1, input.ndim - 1)
    return last and any(watch.softens() for watch in tuple(_interceptions))


def _innermost() -> nn.Module:
    return next(watch._here.stack[-1].module for watch in tuple(_interceptions) if watch._here.stack)


# Hugging Face --------------------------------------------------------------------------------------------------------

_original: list[tuple[Any, Any]] = []


def _intercept_transformers() -> None:
    """Have transformers hand out attention functions that report their calls."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or _original:
        return
    interface = modeling.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():  # another model, which is to be the same graph as ever
            return function
        return partial(_from_interface, attn_implementation, function)

    interface.get_interface = get_interface
    _original.append((interface, original))


def _leave_transformers() -> None:
    if _original and not _interceptions:
        interface, original = _original.pop()
        interface.get_interface = original


def _from_interface(
    implementation: str, function: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """A layer calls the attention function that it asked for: (output [b, m, h, v], weights or None)."""

    def meet() -> InterceptedCall:
        call = of_interface(implementation, module, query, key, value, attention_mask, **kwargs)
        return InterceptedCall(call, lambda found: (found.output.transpose(1, 2).contiguous(), None))

    return _hand(module, meet, partial(function, module, query, key, value, attention_mask, *args, **kwargs))


def _of_multihead(
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
    """A call of torch.nn.MultiheadAttention, projected once more: torch computes the whole layer in one function."""
    layer = module if isinstance(module, MultiheadAttention) else MultiheadAttention.from_torch(module)
    return of_attend(**layer.arguments(query, key, value, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal))


def numbered(layer: str, names: Mapping[str, Any]) -> str:
    """The name of this call: the layer's, numbered from the second on."""
    name, count = layer, 1
    while name in names:
        count += 1
        name = f"{layer}#{count}"
    return name


def names_of(layers: tuple[str, ...]) -> str:
    """A few names, for a message."""
    return ", ".join(layers[:4]) + (f" and {len(layers) - 4} others" if len(layers) > 4 else "")
