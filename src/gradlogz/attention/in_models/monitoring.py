"""Attention statistics during training, without changing the training.

    with monitor(model) as m:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    m.row().layers["transformer.h.3.attn"].entropy.mean       [h]

The model's own attention computes the output. In every `every`-th step the statistics are those of the pass itself, if
a layer asks `attend` for them; otherwise they are computed separately from its queries and keys, without gradients. In
the steps between no hook is installed.

Read next: monitor_rows.py (the statistics and the thresholds), interception.py (how calls are intercepted).
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
from ..result import Attention
from .head_summaries import HeadSums, heads_of, merged, sums_of
from .intercepted_calls import Call
from .interception import LAYERS, Hook, InterceptedCall, Interception, Receiver, names_of, numbered
from .monitor_rows import Alert, MonitorRow, Thresholds
from .writers import writing_function


class Monitor(Receiver):
    """Result of `monitor`: `row()` of the last recorded step; `step()` for loops without an optimizer of torch."""

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
        self._every, self._thresholds, self._group = every, thresholds, group
        self._write_row = None if writer is None else writing_function(writer)
        self._on_alert = _warn if on_alert is None else on_alert
        self._strict = strict
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._parameters = {id(p) for p in model.parameters()}
        self._optimizer: ref[Optimizer] | None = None
        self._highest: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()
        self._sums: dict[str, HeadSums] = {}
        self._called: dict[str, None] = {}
        self._recording = False
        self._last: tuple[str, int] | None = None
        self._row: MonitorRow | None = None
        interception = Interception(self._inner, self, layers=layers)
        self._interception: Any = _EagerPass(model, self._inner, interception) if self._compiled else interception
        self._installed = False

    def row(self) -> MonitorRow:
        """Row of the last recorded step."""
        if self._row is None:
            problem = f"no step with a forward pass has ended so far ({self.steps} steps)"
            remedy = "Without an optimizer of torch, call m.step() at the end of each step."
            raise InputRuntimeError("monitor.row", None, problem, remedy)
        return self._row

    def step(self) -> None:
        """End a step. An optimizer of torch that holds parameters of the model calls this by a hook."""
        step, sums, self._sums = self.steps, self._sums, {}
        if self._installed and self._group is not None:
            sums = merged(sums, self._group, self._device)
        self.steps += 1
        if self._installed and self._strict and self._row is None and not sums:
            problem = f"model made no attention call that could be intercepted in step {step}"
            remedy = "Pass the compiled model if it is compiled; otherwise layers= with a pattern of its class names."
            raise InputRuntimeError("monitor", "model", problem, remedy)
        if self.steps % self._every == 0:
            self._install()
        else:
            self._uninstall()
        if sums:  # last, since a writer may raise
            self._write(step, sums)

    # The receiver of an Interception ---------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a pass; one without gradients is not recorded, since it is not training."""
        self._recording = torch.is_grad_enabled() or self._compiled
        self._called = {}
        return self._recording

    def receive(self, layer: str, intercepted: InterceptedCall, *, again: bool) -> Attention | None:
        """Record the statistics; return the result if the model computes by `attend` itself, else let it compute."""
        if not self._recording or again:
            return None
        if _in_vmap():
            problem = f"model must run outside torch.vmap, but {layer} runs inside it"
            remedy = "Remove the monitor, or pass the batch to the model directly."
            raise InputNotImplementedError("monitor", "model", problem, remedy)
        name = numbered(layer, self._called)
        self._called[name] = None
        call, result = intercepted.call, None
        if intercepted.by_attend and isinstance(call, Call) and call.shows_its_statistics():
            result = call.attend()
        with torch.no_grad():
            sums = sums_of(call, crosses=intercepted.crosses, result=result)
        if name in self._sums:
            self._sums[name].add(sums)
        else:
            self._sums[name] = sums
        if (name, len(self._called)) == self._last:
            raise _LastLayerReached
        return result

    def unfused(self, layer: str) -> None:
        """Raise, since the training would change by rounding."""
        problem = (
            f"model would change by rounding: hooks disable the fused operator of {layer}, frozen and in eval mode"
        )
        remedy = "Call torch.backends.mha.set_fastpath_enabled(False) before the training."
        raise InputRuntimeError("monitor", "model", problem, remedy)

    def finish(self, missed: tuple[str, ...]) -> None:
        """End a pass; raise if an attention layer was missed."""
        self._recording = False
        if self._compiled and self._called:
            self._last = list(self._called)[-1], len(self._called)
        if missed and self._strict:
            problem = f"model has attention layers whose calls cannot be intercepted: {names_of(missed)}"
            remedy = "Pass layers= with a pattern that excludes them, or strict=False to skip them."
            raise InputRuntimeError("monitor", "model", problem, remedy)

    def _install(self) -> None:
        if not self._installed:
            self._interception.__enter__()
            self._installed = True

    def _uninstall(self) -> None:
        if self._installed:
            self._interception.__exit__(None, None, None)
            self._installed = False

    # The end of a step -----------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step after the first optimizer that holds parameters of the model."""
        leader = None if self._optimizer is None else self._optimizer()
        if leader is None and any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"]):
            self._optimizer, leader = ref(optimizer), optimizer
        if optimizer is leader:
            self.step()

    def _write(self, step: int, sums: dict[str, HeadSums]) -> None:
        layers = heads_of(sums)
        alerts = tuple(self._alerts(step, layers))
        self._row = MonitorRow(step, layers, alerts)
        for alert in alerts:
            if (alert.kind, alert.layer) not in self._warned:
                self._warned.add((alert.kind, alert.layer))
                self._on_alert(alert)
        if self._write_row is not None:
            self._write_row(self._row)

    def _alerts(self, step: int, layers: dict[str, Any]) -> Iterator[Alert]:
        entropy, logit, sink = self._thresholds
        for layer, heads in layers.items():
            mean, most = float(heads.entropy.mean.mean()), float(heads.max_logit.greatest.max())
            highest = self._highest[layer] = max(self._highest.get(layer, 0.0), mean)  # this order ignores NaN
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
    """Record entropy, log normaliser, logit variance, maximum logit and sink of every head in every `every`-th step.

    Put it around an ordinary training loop. The training is bitwise unchanged: the model's own attention, with its
    dropout, computes the output; the random state is unchanged; the statistics have no gradient. All passes between two
    steps of the optimizer (accumulated gradients) are one row. Recomputed checkpoints are counted once. Rows of padding
    are left out where a mask identifies them. Passes without gradients (evaluation) are not recorded.

    Calls inside a compiled model cannot be intercepted. Before each recorded pass of such a model, one eager pass
    without gradients is made on the same inputs, up to the last attention layer; random state and buffers are restored.

    Args:
        every: record the steps 0, every, 2 every, ...
        writer: a TensorBoard SummaryWriter (or another object with add_scalar); a function with a parameter `step`,
            which gets the dictionary `MonitorRow.scalars` and step=, as wandb.log; or a function of a `MonitorRow`.
        thresholds: thresholds of the alerts.
        on_alert: function called with each new `Alert`, once for each kind and layer; by default it warns.
        group: process group over which rows are joined; by default that of a DistributedDataParallel model.
        layers: regular expression for class names of attention layers; a softmax inside one belongs to attention.
        strict: raise if an attention layer ran without an intercepted call, or after the first step if there was none.

    Law: tests/laws/test_a_monitor_changes_nothing.py.
    """
    if not isinstance(model, nn.Module):
        remedy = "Pass the model itself."
        raise InputTypeError("monitor", "model", f"model must be a torch.nn.Module, got {type(model).__name__}", remedy)
    if isinstance(model, nn.DataParallel):
        problem = "model must run in one thread, but torch.nn.DataParallel copies it to several"
        raise InputTypeError("monitor", "model", problem, "Use torch.nn.parallel.DistributedDataParallel.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        remedy = "Pass 1 to record every step."
        raise InputValueError("monitor", "every", f"every must be a positive integer, got {every!r}", remedy)
    if group is None and hasattr(model, "process_group"):
        group = model.process_group
    m = Monitor(
        model, every=every, writer=writer, thresholds=thresholds, on_alert=on_alert, group=group, layers=layers,
        strict=strict,
    )  # fmt: skip
    hook = register_optimizer_step_post_hook(m._stepped)
    m._install()
    try:
        yield m
    finally:
        hook.remove()
        m._uninstall()


def _in_vmap() -> bool:
    """Return whether this runs under vmap, whose tensors cannot be used after the transform has ended."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Vmap for each in transforms)


class _LastLayerReached(BaseException):
    """Raised after the last attention layer, to end an eager pass early."""


class _EagerPass:
    """An eager pass before each pass of a compiled model, inside which calls cannot be intercepted."""

    def __init__(self, model: nn.Module, inner: nn.Module, interception: Interception) -> None:
        self._called, self._inner, self._interception = model, inner, interception

    def __enter__(self) -> "_EagerPass":
        self._compiled: Any = self._called.__dict__.get("_compiled_call_impl")
        if self._compiled is None:
            self._hook = self._called.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True)
        else:  # hooks would be compiled too
            self._called._compiled_call_impl = self._run_both
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._compiled is None:
            self._hook.remove()
        else:
            self._called._compiled_call_impl = self._compiled

    def _run_both(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._called, args, kwargs)
        return self._compiled(*args, **kwargs)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._run_eager(args, kwargs)

    def _run_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        buffers = [(m, name, b, b._version, b.clone()) for m in self._inner.modules() for name, b in _buffers(m)]
        devices = {p.device for p in self._inner.parameters() if p.device.type == "cuda"}
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), torch.no_grad(), eager, self._interception, suppress(_LastLayerReached):
            self._inner(*args, **kwargs)
        for module, name, b, version, before in buffers:
            module._buffers[name] = b
            if b._version != version:  # autograd forbids writing to a tensor that a graph has saved
                b.copy_(before)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module._buffers.items() if b is not None]


def _unwrapped(model: nn.Module) -> nn.Module:
    """Module inside the wrappers for distributed training and compilation."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
