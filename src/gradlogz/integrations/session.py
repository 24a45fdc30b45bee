"""A monitor that begins and ends in different functions, and what is done with each of its rows.

    begin(model)     the monitor is installed
    finish_step()    a new row is logged, its alerts are acted on, logits are clipped
    end()            the monitor is removed

Read next: actions.py (what a loop provides), ../attention/in_models/monitoring.py (the monitor).
"""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NotRequired, TypedDict, Unpack

from torch import nn

from ..attention import Alert, Monitor, MonitorRow, Thresholds, monitor, qk_clip
from .actions import Action, TrainingRun
from .head_maps import write_heads


class MonitorOptions(TypedDict):
    """Options of every integration.

    every: record the steps 0, every, 2 every, ...; 25 by default.
    thresholds: thresholds of the alerts.
    actions: functions called with each new alert and the training run, after a warning.
    qk_clip: tau of `qk_clip` in recorded steps; with every=1 in each step, as in Kimi K2.
    heads: also write heat maps (TensorBoard) or a table (Weights & Biases) of all heads.
    group: processes over which rows are joined, as in `monitor`; with tensor parallelism it must be named.
    layers: regular expression for class names of attention layers.
    strict: raise if an attention layer ran without an intercepted call.
    """

    every: NotRequired[int]
    thresholds: NotRequired[Thresholds]
    actions: NotRequired[Sequence[Action]]
    qk_clip: NotRequired[float | None]
    heads: NotRequired[bool]
    group: NotRequired[Any]
    layers: NotRequired[str]
    strict: NotRequired[bool]


class Session:
    """A monitor of a training run, between `begin` and `end`."""

    def __init__(self, run: TrainingRun, **options: Unpack[MonitorOptions]) -> None:
        self._run = run
        self._actions, self._tau = options.pop("actions", ()), options.pop("qk_clip", None)
        self._heads, self._options = options.pop("heads", False), options
        self._rows: list[MonitorRow] = []
        self._alerts: list[Alert] = []
        self._context = ExitStack()
        self._monitor: Monitor | None = None
        self._state: dict[str, Any] | None = None
        self._final: dict[str, Any] = {}
        self._failed = False

    def begin(self, model: nn.Module) -> None:
        """Install the monitor; statistics are those of all processes, or of `group`."""
        options: dict[str, Any] = {**self._options, "writer": self._rows.append, "on_alert": self._alerts.append}
        self._model = model
        self._context.close()  # where a run was interrupted
        self._rows.clear()
        self._alerts.clear()
        self._monitor = self._context.enter_context(monitor(model, **options))
        if self._state is not None:
            self._monitor.load_state_dict(self._state)
            self._state = None

    def finish_step(self) -> None:
        """Log a new row, act on new alerts, clip logits."""
        if self._tau is not None and self._monitor is not None:
            self._monitor.complete_row()  # logits are clipped in the step in which they were large
        rows, self._rows[:] = list(self._rows), []
        alerts, self._alerts[:] = list(self._alerts), []
        for row in rows:
            scalars = row.scalars()
            if self._tau is not None:
                factors = qk_clip(self._model, row, self._tau, group=self._options.get("group"))
                scalars["attention/clipped_heads"] = float(sum((gamma < 1).sum() for gamma in factors.values()))
            self._write(row, scalars)
        for alert in alerts:
            warnings.warn(str(alert), stacklevel=2)
            for action in self._actions:
                action(alert, self._run)

    def _write(self, row: MonitorRow, scalars: dict[str, float]) -> None:
        """Log a row; an error of the logger must not end the training, and is a warning once."""
        try:
            self._run.log(scalars, row.step)
            if self._heads:
                for experiment in self._run.experiments():
                    write_heads(experiment, row, row.step)
        except Exception as error:
            if not self._failed:
                self._failed = True
                warnings.warn(f"statistics of attention could not be logged: {error!r}", stacklevel=3)

    def end(self) -> None:
        """Remove the monitor, after the last row is logged."""
        try:
            if self._monitor is not None:
                self._final = self._monitor.state_dict()
                self.finish_step()
        finally:  # an action may raise
            self._monitor = None
            self._context.close()

    def state_dict(self) -> dict[str, Any]:
        """State of the monitor, for a checkpoint: plain numbers and strings."""
        return self._final if self._monitor is None else self._monitor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, now or from `begin` on."""
        if self._monitor is None:
            self._state = state or None
        elif state:
            self._monitor.load_state_dict(state)
