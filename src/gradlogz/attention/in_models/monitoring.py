"""Watching attention during training, without touching it.

    with monitor(model) as m:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    m.row().layers["transformer.h.3.attn"].entropy.mean       [h]

The model's own attention computes the output; the statistics come from its queries and keys, on the side and without
gradients, in every `every`-th step. Between those nothing at all is installed.

Read next: head_summaries.py (what is collected, when it is alarming), interception.py (how layers are found).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._errors import InputNotImplementedError, InputRuntimeError, InputTypeError, InputValueError
from ..._typing import Tensor
from .head_summaries import Alert, HeadSums, MonitorRow, Thresholds, heads_of, merged, sums_of
from .interception import LAYERS, Hook, InterceptedCall, Interception, Receiver, names_of, numbered


class Monitor(Receiver):
    """What `monitor` yields: the rows of the steps, and the end of a step for loops without an optimizer of torch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        writer: Any,
        thresholds: Thresholds,
        on_alert: Callable[[Alert], None] | None,
        group: Any,
        layers: str,
        strict: bool,
    ) -> None:
        self.steps = 0
        self._inner, self._compiled = _unwrapped(model), _compiled(model)
        self._every, self._writer, self._thresholds, self._group = every, writer, thresholds, group
        self._on_alert = _warn if on_alert is None else on_alert
        self._strict = strict
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._parameters = {id(p) for p in model.parameters()}
        self._optimizer: ref[Optimizer] | None = None
        self._highest: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()
        self._found: dict[str, HeadSums] = {}
        self._called: dict[str, None] = {}
        self._recording = False
        self._last: tuple[str, int] | None = None
        self._row: MonitorRow | None = None
        watch = Interception(self._inner, self, layers=layers)
        self._watch: Any = _Shadow(model, self._inner, watch) if self._compiled else watch
        self._armed = False

    def row(self) -> MonitorRow:
        """The row of the last step that was looked at."""
        if self._row is None:
            fact = f"{self.steps} steps" if self.steps else "none: no optimizer has stepped yet"
            remedy = "Without an optimizer of torch call m.step() where a step ends."
            raise InputRuntimeError(
                "monitor.row", None, f"a step with a forward pass must have ended, got {fact}", remedy
            )
        return self._row

    def step(self) -> None:
        """End a step. Optimizers of torch that hold the model's parameters do it by themselves."""
        step, found, self._found = self.steps, self._found, {}
        if self._armed and self._group is not None:
            found = merged(found, self._group, self._device)
        self.steps += 1
        if self.steps % self._every == 0:
            self._arm()
        else:
            self._disarm()
        if found:  # last, because a writer may raise
            self._write(step, found)

    # The watch -------------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """A pass begins; one without gradients is no training."""
        self._recording = torch.is_grad_enabled() or self._compiled
        self._called = {}
        return self._recording

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> None:
        """Look at the queries and keys, and let the model compute."""
        if not self._recording or again:
            return
        if _in_vmap():
            condition, fact = "the model must run outside torch.vmap", f"{layer} inside it"
            remedy = "Leave the monitor out, or give the model the batch itself."
            raise InputNotImplementedError("monitor", "model", f"{condition}, got {fact}", remedy)
        name = numbered(layer, self._called)
        self._called[name] = None
        with torch.no_grad():
            sums = sums_of(met.call, crosses=met.crosses)
        if name in self._found:
            self._found[name].add(sums)
        else:
            self._found[name] = sums
        if (name, len(self._called)) == self._last:
            raise _Enough

    def unfused(self, layer: str) -> None:
        """Refuse to change a training by rounding."""
        condition = "torch must compute its layers the same with and without hooks"
        fact = f"{layer}, frozen and in eval mode, for which it has a fused operator"
        remedy = "Call torch.backends.mha.set_fastpath_enabled(False) before the training."
        raise InputRuntimeError("monitor", "torch", f"{condition}, got {fact}", remedy)

    def finish(self, missed: tuple[str, ...]) -> None:
        """A pass has ended."""
        self._recording = False
        if self._compiled and self._called:
            self._last = list(self._called)[-1], len(self._called)
        if missed and self._strict:
            condition = "every attention layer must make a call that can be seen"
            remedy = "Pass layers= with a pattern that leaves them out, or strict=False to go on without them."
            raise InputRuntimeError("monitor", "model", f"{condition}, got none from {names_of(missed)}", remedy)

    def _arm(self) -> None:
        if not self._armed:
            self._watch.__enter__()
            self._armed = True

    def _disarm(self) -> None:
        if self._armed:
            self._watch.__exit__(None, None, None)
            self._armed = False

    # The end of a step -----------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped. The first one that holds parameters of the model counts the steps."""
        leader = None if self._optimizer is None else self._optimizer()
        if leader is None and any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"]):
            self._optimizer, leader = ref(optimizer), optimizer
        if optimizer is leader:
            self.step()

    def _write(self, step: int, found: dict[str, HeadSums]) -> None:
        layers = heads_of(found)
        alerts = tuple(self._alerts(step, layers))
        self._row = MonitorRow(step, layers, alerts)
        for alert in alerts:
            if (alert.kind, alert.layer) not in self._warned:
                self._warned.add((alert.kind, alert.layer))
                self._on_alert(alert)
        if self._writer is None:
            return
        if not hasattr(self._writer, "add_scalar"):
            self._writer(self._row)
            return
        for layer, heads in layers.items():
            scalars = {
                "entropy": heads.entropy.mean.mean(),
                "entropy of the lowest head": heads.entropy.mean.min(),
                "log normalizer": heads.log_normalizer.mean.mean(),
                "logit variance": heads.logit_variance.mean.mean(),
                "max logit": heads.max_logit.greatest.max(),
                "sink": heads.sink.mean.mean(),
            }
            for name, value in scalars.items():
                self._writer.add_scalar(f"{name}/{layer}", float(value), step)

    def _alerts(self, step: int, layers: dict[str, Any]) -> Iterator[Alert]:
        entropy, logit, sink = self._thresholds
        for layer, heads in layers.items():
            mean, most = float(heads.entropy.mean.mean()), float(heads.max_logit.greatest.max())
            highest = self._highest[layer] = max(self._highest.get(layer, 0.0), mean)  # in this order NaN is none
            if entropy is not None and mean < entropy * highest:
                yield Alert("entropy collapse", layer, mean, entropy * highest, step)
            if logit is not None and most > logit:
                yield Alert("logit explosion", layer, most, logit, step)
            if sink is not None and float((heads.sink.mean > sink).double().mean()) > 0.5:
                yield Alert("attention sink", layer, float(heads.sink.mean.median()), sink, step)


def _warn(alert: Alert) -> None:
    warnings.warn(str(alert), stacklevel=2)


@contextmanager
def monitor(
    model: nn.Module,
    *,
    every: int = 25,
    writer: Any = None,
    thresholds: Thresholds = Thresholds(),
    on_alert: Callable[[Alert], None] | None = None,
    group: Any = None,
    layers: str = LAYERS,
    strict: bool = True,
) -> Iterator[Monitor]:
    """Entropy, log normaliser, logit variance, highest logit and sink of every head, in every `every`-th training step.

    Put it around an ordinary training loop. The training is not changed by a bit: the model's own attention, with its
    own dropout, computes the output; the random state is left alone; what is collected has no gradient. Passes between
    two steps of the optimizer (accumulated gradients) are one row. Recomputed checkpoints are counted once. Rows of
    padding are left out where a mask shows them. Passes without gradients (evaluation) are not looked at.

    A model that is compiled is not looked at while it runs: before the pass, one more is made without compilation,
    without gradients and on the same inputs, up to the last attention layer; random state and buffers are put back.

    Args:
        every: look at each step whose number is a multiple of this, from 0 on.
        writer: a TensorBoard SummaryWriter, or anything that takes a `MonitorRow`.
        thresholds: when to raise an alert.
        on_alert: is given each new `Alert`, once for each kind and layer; by default it is a warning.
        group: the processes over which rows are joined; a model wrapped for distributed training has its own.
        layers: a regular expression for the class names of attention layers, in which a softmax is one of attention.
        strict: raise if an attention layer ran without being seen, or none did.

    Law: tests/laws/test_a_monitor_changes_nothing.py.
    """
    if not isinstance(model, nn.Module):
        remedy = "Pass the model itself."
        raise InputTypeError("monitor", "model", f"model must be a torch.nn.Module, got {type(model).__name__}", remedy)
    if isinstance(model, nn.DataParallel):
        condition, fact = "model must run in one thread", "torch.nn.DataParallel, which copies it to many"
        remedy = "Use torch.nn.parallel.DistributedDataParallel."
        raise InputTypeError("monitor", "model", f"{condition}, got {fact}", remedy)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        remedy = "1 looks at every step."
        raise InputValueError("monitor", "every", f"every must be a positive integer, got {every!r}", remedy)
    if writer is not None and not callable(writer) and not hasattr(writer, "add_scalar"):
        condition = "writer must have add_scalar or take a row"
        remedy = "Pass a SummaryWriter, or a function of one argument."
        raise InputTypeError("monitor", "writer", f"{condition}, got {type(writer).__name__}", remedy)
    if group is None and hasattr(model, "process_group"):
        group = model.process_group
    m = Monitor(
        model, every=every, writer=writer, thresholds=thresholds, on_alert=on_alert, group=group, layers=layers,
        strict=strict,
    )  # fmt: skip
    hook = register_optimizer_step_post_hook(m._stepped)
    m._arm()
    try:
        yield m
    finally:
        hook.remove()
        m._disarm()
    if strict and m.steps and m._row is None:
        condition, fact = "the model must compute attention", f"{m.steps} steps without any"
        remedy = "If its classes are named otherwise, pass their pattern as layers=; a compiled function is not seen."
        raise InputRuntimeError("monitor", "model", f"{condition}, got {fact}", remedy)


def _in_vmap() -> bool:
    """Whether tensors stand for many, and cannot be kept after the transform has ended."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Vmap for each in transforms)


class _Enough(BaseException):
    """The last attention layer was met, and what follows in the pass is of no interest."""


class _Shadow:
    """One more pass, before that of a compiled model: what is compiled cannot be watched from outside."""

    def __init__(self, model: nn.Module, inner: nn.Module, watch: Interception) -> None:
        self._called, self._inner, self._watch = model, inner, watch

    def __enter__(self) -> "_Shadow":
        self._compiled: Any = self._called.__dict__.get("_compiled_call_impl")
        if self._compiled is None:
            self._hook = self._called.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True)
        else:  # its hooks are compiled too
            self._called._compiled_call_impl = self._looked_at
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._compiled is None:
            self._hook.remove()
        else:
            self._called._compiled_call_impl = self._compiled

    def _looked_at(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._called, args, kwargs)
        return self._compiled(*args, **kwargs)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._look(args, kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        buffers = [(m, name, b, b._version, b.clone()) for m in self._inner.modules() for name, b in _buffers(m)]
        devices = {p.device for p in self._inner.parameters() if p.device.type == "cuda"}
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), torch.no_grad(), eager, self._watch, suppress(_Enough):
            self._inner(*args, **kwargs)
        for module, name, b, version, before in buffers:
            module._buffers[name] = b
            if b._version != version:  # to write into one that a graph has saved is an error of autograd's
                b.copy_(before)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module._buffers.items() if b is not None]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside what wraps it for distributed training and compilation."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _compiled(model: nn.Module) -> bool:
    """Whether torch.compile has been put on the model or on a part of it."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
