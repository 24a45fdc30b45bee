"""Attention statistics during training, without changing the training.

    with monitor(model) as m:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    m.row().layers["transformer.h.3.attn"].entropy.mean       [h]

The model's own attention computes the output. In every `every`-th step the statistics are those of the pass itself, if
a layer asks `attend` for them; otherwise they are computed separately from its queries and keys, without gradients. In
the steps between no hook is installed.

Read next: monitor_rows.py (the statistics), alerts.py (the thresholds), interception.py (how calls are intercepted).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._errors import InputNotImplementedError, InputRuntimeError, InputTypeError, InputValueError
from ..result import Attention
from ..ring import ring_attend
from .alerts import AlertHistory, Thresholds
from .compiled_passes import CompiledPasses
from .head_summaries import LayerSums, SharedSights, Transfer, merged, sums_of
from .hooks import refuse_vmap
from .intercepted_calls import Logits
from .interception import LAYERS, InterceptedCall, Interception, Receiver, is_attention, names_of, numbered, unwrapped
from .layer_kinds import kind_of
from .monitor_rows import Alert, MonitorRow
from .process_check import await_processes
from .ring_calls import call_from_ring
from .writers import RowWriter


class _UnreadRow(NamedTuple):
    """A recorded step whose statistics may still be on the GPU."""

    step: int
    sums: Transfer
    missed: tuple[str, ...]


class Monitor(Receiver):
    """Result of `monitor`: `row()` of the last recorded step; `step()` for loops without an optimizer of torch.

    `steps` is the number of steps so far; `state_dict` and `load_state_dict` continue it after an interruption.
    """

    functions = MappingProxyType({ring_attend: call_from_ring})

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
        self._inner, self._compiled = unwrapped(model), _compiled(model)
        self._every, self._group, self._strict = every, group, strict
        self._writer = None if writer is None else RowWriter(writer)
        self._history = AlertHistory(thresholds, on_alert)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._optimizer: ref[Optimizer] | None = None
        self._missed: tuple[str, ...] = ()
        self._without_softmax: dict[str, str] = {}
        self._sums: dict[str, LayerSums] = {}
        self._called: dict[str, None] = {}
        self._sights = SharedSights()
        self._recording = False
        self._row: MonitorRow | None = None
        self._unread: _UnreadRow | None = None
        self._delayed = self._device.type == "cuda"
        interception = Interception(self._inner, self, layers=layers)
        self._kinds = {interception.names[id(module)]: kind_of(module) for module in self._inner.modules()}
        self._passes = CompiledPasses(model, self._inner, interception, self._record) if self._compiled else None
        self._interception: Any = interception if self._passes is None else self._passes
        self._installed = False

    def row(self) -> MonitorRow:
        """Row of the last recorded step; on a GPU this waits for the step."""
        self.complete_row()
        if self._row is None:
            problem = f"no step with a forward pass has ended so far ({self.steps} steps)"
            remedy = "Without an optimizer of torch, call m.step() at the end of each step."
            raise InputRuntimeError("monitor.row", None, problem, remedy)
        return self._row

    def complete_row(self) -> None:
        """Wait for the statistics of the last recorded step, if they are on their way; report and write its row."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._write(unread)

    def step(self) -> None:
        """End a step. An optimizer of torch that holds parameters of the model calls this by a hook."""
        self._refuse_capture()
        step, sums, self._sums = self.steps, self._sums, {}
        self._sights = SharedSights()  # also after a pass that ended early
        if self._installed and self._group is not None:
            sums = merged(sums, self._group, self._device)
        self.steps += 1
        has_row = bool(sums) or (self._installed and bool(self._without_softmax))
        if self._installed and self._strict and not has_row and self._row is None and self._unread is None:
            problem = f"model made no attention call that could be intercepted in step {step}"
            remedy = (
                "Pass the compiled model if it is compiled, or layers= with a pattern of its class names; passes "
                "without gradients are not recorded."
            )
            raise InputRuntimeError("monitor", "model", problem, remedy)
        if self.steps % self._every == 0:
            self._install()
        else:
            self._uninstall()
        unread, self._unread = self._unread, _UnreadRow(step, Transfer(sums), self._missed) if has_row else None
        if unread is not None:  # last, since a function for alerts may raise
            self._write(unread)
        if not self._delayed:
            self.complete_row()

    def state_dict(self) -> dict[str, Any]:
        """Number of steps and history of the alerts, for a checkpoint of the training: plain numbers and strings."""
        self.complete_row()
        return {"steps": self.steps, "alerts": self._history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the numbering of steps, and the alerts, from a checkpoint."""
        self.steps = state["steps"]
        self._history.load_state_dict(state["alerts"])
        if self.steps % self._every == 0:
            self._install()
        else:
            self._uninstall()

    # The receiver of an Interception ---------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a pass; one without gradients is not recorded, since it is not training."""
        self._recording = torch.is_grad_enabled() or self._compiled
        self._called = {}
        self._sights = SharedSights()
        self._without_softmax = {}
        return self._recording

    def receive(self, layer: str, intercepted: InterceptedCall, *, again: bool) -> Attention | None:
        """Record the statistics; return the result if the model computes by `attend` itself, else let it compute."""
        if not self._recording or again:
            return None
        self._refuse_capture()
        refuse_vmap("monitor", layer)
        name = numbered(layer, self._called)
        self._called[name] = None
        call, result = intercepted.call, None
        if intercepted.by_attend and not isinstance(call, Logits) and call.shows_its_statistics():
            result = call.attend()
        with torch.no_grad():
            sums = sums_of(
                call, crosses=intercepted.crosses, result=result, keys_visible_to=self._sights.keys_visible_to
            )
        self._record(name, sums)
        if self._passes is not None:
            self._passes.add_call(name, call, crosses=intercepted.crosses, by_attend=intercepted.by_attend, sums=sums)
        return result

    def _refuse_capture(self) -> None:
        """Raise while a CUDA graph is captured by hand: its replays run no hook, so that nothing would be recorded."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem = "model must run outside the capture of a CUDA graph, whose replays cannot be recorded"
            remedy = 'Capture the step before the monitor begins, or use torch.compile(mode="reduce-overhead") instead.'
            raise InputNotImplementedError("monitor", "model", problem, remedy)

    def _record(self, name: str, sums: LayerSums) -> None:
        if name in self._sums:
            self._sums[name].add(sums)
        else:
            self._sums[name] = sums

    def unfused(self, layer: str) -> None:
        """Raise, since the training would change by rounding."""
        problem = (
            f"model would change by rounding: hooks disable the fused operator of {layer}, frozen and in eval mode"
        )
        remedy = "Call torch.backends.mha.set_fastpath_enabled(False) before the training."
        raise InputRuntimeError("monitor", "model", problem, remedy)

    def accept_without_softmax(self, layer: str, kind: str) -> bool:
        """Record the kind of a layer of linear or sigmoid attention."""
        self._without_softmax[layer] = kind
        return True

    def finish(self, missed: tuple[str, ...]) -> None:
        """End a pass; raise if an attention layer was missed."""
        names = tuple(name.partition(" (")[0] for name in missed)  # without classes
        self._recording, self._missed = False, (*self._without_softmax, *names)
        self._sights = SharedSights()  # keeps no mask after its pass
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
        if leader is None and has_parameters_of(self._inner, optimizer):
            self._optimizer, leader = ref(optimizer), optimizer
        if optimizer is leader:
            self.step()

    def _write(self, unread: "_UnreadRow") -> None:
        layers = unread.sums.heads(self._kinds)
        alerts = self._history.alerts(unread.step, layers)
        self._row = MonitorRow(unread.step, layers, alerts, unread.missed)
        self._history.report(alerts)
        if self._writer is not None:
            self._writer.write(self._row)


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

    On a GPU the training does not wait for the statistics: the row of a step is written, and its alerts are reported,
    at the end of the next step, or earlier by `m.row()`.

    Calls inside a compiled model cannot be intercepted. Its attention operators are read when its graph runs: those of
    `attend` with their statistics, the fused ones of torch with their queries and keys. One eager pass without
    gradients, at the first recorded step, up to the last attention layer, gives the names of the layers; random state
    and buffers are restored. A graph without such operators, and CUDA graphs of torch.compile, which run no reader, get
    an eager pass before each recorded pass; a step that is captured by hand is refused.

    Args:
        every: record the steps 0, every, 2 every, ...
        writer: a TensorBoard SummaryWriter (or another object with add_scalar); a function with a parameter `step`,
            which gets the dictionary `MonitorRow.scalars` and step=, as wandb.log; or a function of a `MonitorRow`.
        thresholds: thresholds of the alerts.
        on_alert: function called with each new `Alert`, once for each kind and layer; by default a warning is issued,
            at most one for each kind and step.
        group: process group over which rows are joined; each of its processes must monitor the model, and one that does
            not begin within five minutes is an error. By default that
            of a DistributedDataParallel or FSDP model, else all processes if torch.distributed is initialised. With
            tensor parallelism it must be named: the processes with the same heads. "local": each process has its own
            rows.
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
    elif group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
        if dist.get_world_size() > 1 and _split_by_heads(model, layers):
            problem = "group must be named, since tensor parallelism gives each process other heads of the same layers"
            remedy = 'Pass group="local", or the group of processes with the same heads: mesh["dp"].get_group().'
            raise InputValueError("monitor", "group", problem, remedy)
    elif group == "local":
        group = None
    if group is not None:
        await_processes("monitor", group)
    m = Monitor(
        model, every=every, writer=writer, thresholds=thresholds, on_alert=on_alert, group=group, layers=layers,
        strict=strict,
    )  # fmt: skip
    hook = register_optimizer_step_post_hook(m._stepped)
    try:
        m._install()
        yield m
        m.complete_row()
    finally:
        hook.remove()
        m._uninstall()


def has_parameters_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds parameters that the model has now: `fully_shard` replaces them."""
    parameters = {id(p) for p in model.parameters()}
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])


def _split_by_heads(model: nn.Module, layers: str) -> bool:
    """Return whether parameters of attention layers are split in more dimensions of a mesh than FSDP splits them in."""
    modules = list(model.modules())
    by_fsdp = any(base.__name__ == "FSDPModule" for module in modules for base in type(module).__mro__)
    parameters = [p for module in modules if is_attention(module, layers) for p in module.parameters()]
    return any(sum(not each.is_replicate() for each in getattr(p, "placements", ())) > by_fsdp for p in parameters)


def _compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled: as a module, in place, or its method forward alone."""
    return any(
        hasattr(m, "_orig_mod") or m._compiled_call_impl is not None or hasattr(m.forward, "_torchdynamo_orig_callable")
        for m in model.modules()
    )
